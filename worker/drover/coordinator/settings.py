"""Config: everything the coordinator is told, once, by its flags. Light: nothing heavy is imported here."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_CONTEXT = 4096
DEFAULT_PORT = 8080
DEFAULT_GRACE = 30.0
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


@dataclass(frozen=True, slots=True)
class Config:
    """The flags of one coordinator process."""

    model: Path
    rpc: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] | None = None
    context: int | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    batch_size: int = 512
    parallel: int = 1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    threads: int | None = None
    api_key: str | None = None
    grace: float = DEFAULT_GRACE
    alias: str | None = None
    verbose: bool = False
    fingerprint: str | None = None
    prompt: str | None = None
    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None

    @property
    def model_name(self) -> str:
        """What the API calls the model."""
        return self.alias or self.model.stem
