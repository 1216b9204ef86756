"""The longest context that a policy was built for."""

from pathlib import Path

from transformers import AutoConfig

from infra.store.adapter_folder import whole_folder


def context_of(folder: Path) -> int:
    """Most tokens of prompt plus completion, from the folder's config.json."""
    config = AutoConfig.from_pretrained(whole_folder(folder), local_files_only=True).get_text_config()
    return int(config.max_position_embeddings)
