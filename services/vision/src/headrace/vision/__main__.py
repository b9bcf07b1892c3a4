"""`python -m headrace.vision`"""

import headrace.engine.models.vision.loader  # noqa: F401  torch, before there are threads that stand back: they would load it late
from headrace.bus import run_service

from .service import VisionService

if __name__ == "__main__":
    run_service(VisionService)
