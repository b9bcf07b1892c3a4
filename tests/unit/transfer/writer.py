"""A writer process for the tests: `python writer.py ADDRESS_HEX KIND SHM_DIR MODE`, tells what it does on stdout.

forever   write the whole of region kv under generation 1 again and again until something stops it
once      one write and commit under generation 1
hold      connect and do nothing
"""

import asyncio
import sys
import time

from headrace.transfer import Memory, TransferError, connect


async def main(address: bytes, kind: str, shm_dir: str, mode: str) -> None:
    own = Memory("writer", shm_dir=shm_dir, kinds=(kind,))
    peer = await connect(address, own.incarnation, kinds=(kind,), timeout=5, shm_dir=shm_dir)
    print(own.incarnation, flush=True)
    nbytes = peer.address.regions["kv"].nbytes
    try:
        if mode == "forever":
            value = 0
            while True:
                value = value % 255 + 1
                await peer.write("kv", [(0, bytes([value]) * nbytes)], 1, time.monotonic() + 60)
                if value == 1:
                    print("writing", flush=True)
        elif mode == "once":
            await peer.write("kv", [(0, b"\x07" * nbytes)], 1, time.monotonic() + 5)
            await peer.commit("mailbox", 8, (1 << 32) | 1, 1, time.monotonic() + 5)
            print("committed", flush=True)
        await asyncio.sleep(60)
    except TransferError as error:
        print(type(error).__name__, flush=True)


if __name__ == "__main__":
    asyncio.run(main(bytes.fromhex(sys.argv[1]), *sys.argv[2:5]))
