// section intrinsics; needs builtins; tokens *
// What only a device can do, under one name each: another vendor's is a table like this one.

#define ZK_MAXIMUM ::fmaxf
#define ZK_MINIMUM ::fminf
#define ZK_RSQRT ::rsqrtf
#define ZK_FMA_HALF zk_fma_half
// Vectors are where Metal has them, long4 at a multiple of 32 bytes.
#define ZK_MOST_ALIGNED 32
// The constants of a text are computed by the compiler, without instructions.
#define ZK_CONVERT(convert, x) (__builtin_is_constant_evaluated() ? convert(x) : convert##_now(x))
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
#define zk_bfloat_of_float_now zk_bfloat_of_float
#endif

namespace metal {

// Lanes of a simdgroup; `mask` names those that take part, which all wait for each other.
__forceinline__ unsigned zk_lane() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__forceinline__ unsigned zk_intrinsic_shuffle(unsigned mask, unsigned x, unsigned from) {
  return __shfl_sync(mask, x, from);
}
__forceinline__ unsigned zk_intrinsic_shuffle_xor(unsigned mask, unsigned x, unsigned bits) {
  return __shfl_xor_sync(mask, x, bits);
}
__forceinline__ unsigned zk_intrinsic_ballot(unsigned mask, bool x) {
  return __ballot_sync(mask, x);
}
__forceinline__ unsigned zk_intrinsic_active() { return __activemask(); }

__forceinline__ void zk_intrinsic_meet_simd(unsigned mask) { __syncwarp(mask); }
__forceinline__ void zk_intrinsic_meet_group() { __syncthreads(); }
// Threads of one simdgroup may be at different barriers of this kind.
__forceinline__ void zk_intrinsic_meet_apart() { asm volatile("barrier.sync 0;" ::: "memory"); }
__forceinline__ void zk_intrinsic_fence_group() { __threadfence_block(); }
__forceinline__ void zk_intrinsic_fence_device() { __threadfence(); }

__forceinline__ unsigned short zk_half_of_float_now(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__forceinline__ float zk_float_of_half_now(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__forceinline__ unsigned short zk_fma_half(unsigned short x, unsigned short y, unsigned short z) {
  unsigned short bits;
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(bits) : "h"(x), "h"(y), "h"(z));
  return bits;
}
#ifndef zk_bfloat_of_float_now
__forceinline__ unsigned short zk_bfloat_of_float_now(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

__forceinline__ float zk_intrinsic_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__forceinline__ float zk_intrinsic_sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Matrix units. In a lane's fragment of an 8x8 matrix, low half first, are two elements of row
// lane / 4, from column 2 (lane % 4) on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define ZK_MATRIX_UNITS 1
__forceinline__ unsigned zk_intrinsic_transpose(unsigned fragment) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}
// c += a·b, for `b` transposed. The units take 16 rows; the upper 8 are zeros here.
#define ZK_MULTIPLY(name, type)                                                                \
  __forceinline__ void name(unsigned a, unsigned b, float& x, float& y) {                      \
    float u = 0.0f, v = 0.0f;                                                                  \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 "                          \
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                  \
        : "+f"(x), "+f"(y), "+f"(u), "+f"(v)                                                   \
        : "r"(a), "r"(0u), "r"(b));                                                            \
  }
ZK_MULTIPLY(zk_intrinsic_multiply_half, "f16")
ZK_MULTIPLY(zk_intrinsic_multiply_bfloat, "bf16")
#undef ZK_MULTIPLY
#endif

}  // namespace metal
