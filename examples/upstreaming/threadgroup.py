"""A threadgroup for a grid: what `mx.fast.metal_kernel` could choose where a caller names none."""


def threadgroup(
    grid: tuple[int, int, int], most: int = 1024, simd: int = 32
) -> tuple[int, int, int]:
    """The size of the threadgroups that cover a grid of threads.

    Threads along x come first, since neighbours there read neighbouring memory; what is left of
    `most` goes to y, then to z. An axis that does not fit is cut into equal parts, so that no group
    at the end is nearly empty, and a part of x is whole simdgroups. No axis is longer than the
    grid's, which Metal would not fill.

    Args:
        grid: threads along x, y and z.
        most: threads in a group; 1024 on all of Apple's GPUs, less for a kernel that needs many
            registers (`maxTotalThreadsPerThreadgroup`).
        simd: threads in a simdgroup.

    Raises:
        ValueError: a size is not positive, or a group does not hold a simdgroup.
    """
    if len(grid) != 3 or min(grid) < 1:
        raise ValueError(f"[threadgroup] 'grid' must be three positive sizes but got {grid}.")
    if simd < 1 or most < simd:
        raise ValueError(f"[threadgroup] 'most' must hold {simd} threads but got {most}.")
    sizes = []
    left = most
    for axis, length in enumerate(grid):
        parts = -(-length // left)
        size = -(-length // parts)
        if axis == 0 and parts > 1:
            size = -(-size // simd) * simd
            size = min(size, left // simd * simd)
        sizes.append(size)
        left //= size
    return sizes[0], sizes[1], sizes[2]
