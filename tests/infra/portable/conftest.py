from tests.infra.store.conftest import moto_endpoint, s3_url

__all__ = ["moto_endpoint", "s3_url"]
