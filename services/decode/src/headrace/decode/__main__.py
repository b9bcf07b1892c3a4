"""`python -m headrace.decode`"""

from headrace.bus import run_service

from .service import DecodeService

if __name__ == "__main__":
    run_service(DecodeService)
