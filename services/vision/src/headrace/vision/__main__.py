"""`python -m headrace.vision`"""

from headrace.bus import run_service

from .service import VisionService

if __name__ == "__main__":
    run_service(VisionService)
