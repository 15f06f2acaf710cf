const zmlx = @import("zmlx");
pub fn main() void {}
test { _ = zmlx; }
