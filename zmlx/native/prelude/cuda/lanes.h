// section lanes
// ZMLX_LANES is not defined here: a kernel has loops of its own in its place.
