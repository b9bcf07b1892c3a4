"""Compiling a kernel for Hopper without a card, to look at what comes out. Knows no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compiled_for_hopper(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    pointer: str = "*i32",
    odd: Sequence[str] = (),
    warps: int = 4,
) -> Any:
    """`types` of arguments by name; of the others, names that end with _ptr are `pointer` and the rest i32. All but those in
    `odd` are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {name: types.get(name, pointer if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kind for name, kind in known.items()},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in known if name not in (*odd, *constants)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
