//! Ops of the catalogue, forward and backward, from the kernels that Python exports.
//!
//! Every array that a function returns belongs to the caller. A forward that a backward follows is
//! its `…Training` form, which also keeps the statistics of the rows. Errors are those of Python.

const cross_entropy = @import("catalogue/cross_entropy.zig");
const gated = @import("catalogue/swiglu.zig");
const norms = @import("catalogue/norms.zig");
const softmaxes = @import("catalogue/softmax.zig");
const turning = @import("catalogue/rope.zig");

pub const catalogue = @import("catalogue/table.zig").catalogue;

pub const softmax = softmaxes.softmax;
pub const softmaxBackward = softmaxes.softmaxBackward;

pub const Normed = norms.Normed;
pub const NormGradients = norms.NormGradients;
pub const rmsNorm = norms.rmsNorm;
pub const rmsNormTraining = norms.rmsNormTraining;
pub const rmsNormBackward = norms.rmsNormBackward;
pub const layerNorm = norms.layerNorm;
pub const layerNormTraining = norms.layerNormTraining;
pub const layerNormBackward = norms.layerNormBackward;

pub const Gated = gated.Gated;
pub const GatedGradients = gated.GatedGradients;
pub const swiglu = gated.swiglu;
pub const swigluBackward = gated.swigluBackward;

pub const RopeOptions = turning.Options;
pub const rope = turning.rope;
pub const ropeBackward = turning.ropeBackward;

pub const CrossEntropyOptions = cross_entropy.CrossEntropyOptions;
pub const Loss = cross_entropy.Loss;
pub const Reduction = cross_entropy.Reduction;
pub const crossEntropy = cross_entropy.crossEntropy;
pub const crossEntropyTraining = cross_entropy.crossEntropyTraining;
pub const crossEntropyBackward = cross_entropy.crossEntropyBackward;
