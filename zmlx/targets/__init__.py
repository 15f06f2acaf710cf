"""Where kernels run: `metal`, `cuda` and `cpu` offer the same functions (unavailable, prepare,
launch); the `reference` target is plain MLX and needs none."""
