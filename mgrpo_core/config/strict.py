"""The base of every section: unknown keys are refused, sections are frozen."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # what is refused may be a credential
    )
