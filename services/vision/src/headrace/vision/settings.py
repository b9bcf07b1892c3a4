"""Settings of the vision service."""

from __future__ import annotations

from typing import Annotated

from headrace.bus import Meta, Settings
from headrace.bus.cores import usable_cores


class VisionSettings(Settings):
    """Bytes are of memory in this process."""

    model: Annotated[str, Meta(description="folder of the checkpoint; it must have a vision_config")] = ""
    model_path: Annotated[str, Meta(description="the same as --model")] = ""
    device: Annotated[str, Meta(description="cpu or cuda, of the encoder; decoding is the CPU's")] = "cpu"
    threads: Annotated[int, Meta(ge=0, description="compute threads of the encoder; 0: half of the cores")] = 0
    decoders: Annotated[int, Meta(ge=1, le=64, description="images decoded at a time")] = 1
    nice: Annotated[
        int, Meta(ge=0, le=19, description="steps by which decoding and encoding stand back behind other work of the host")
    ] = 10
    batch_patches: Annotated[
        int, Meta(ge=1, description="patches that go through the encoder at a time; a larger image goes alone")
    ] = 4096
    pixel_bytes: Annotated[int, Meta(ge=1 << 20, description="resized pixels kept, until they are encoded")] = 256 << 20
    embedding_bytes: Annotated[int, Meta(ge=1 << 20, description="embeddings kept for the next request")] = 256 << 20
    intake_bytes: Annotated[int, Meta(ge=1 << 20, description="encoded images from gateways")] = 96 << 20
    max_images: Annotated[int, Meta(ge=1, description="images being identified; more are refused")] = 1024
    fetches: Annotated[int, Meta(ge=1, description="images by URL at a time, from download to pixels; 32 MB each at most")] = 16
    fetch_seconds: Annotated[float, Meta(gt=0, description="longest download of one image, redirects included")] = 20.0
    allow_private_addresses: Annotated[
        bool, Meta(description="fetch images from private, loopback and link-local addresses too; for trusted clients only")
    ] = False
    tcp_host: Annotated[str, Meta(description="address that peers connect to for bytes; none: --host, or this machine's")] = ""
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="port for bytes; 0: a free one")] = 0

    def __post_init__(self) -> None:
        if self.model_path:
            if self.model and self.model != self.model_path:
                raise ValueError(f"--model {self.model} and --model-path {self.model_path} differ; give one of them")
            self.model = self.model_path
        if not self.model:
            raise ValueError("the vision service needs a checkpoint: --model FOLDER (`headrace make-checkpoint` writes one)")

    @property
    def compute_threads(self) -> int:
        return self.threads or max(1, usable_cores() // 2)
