// section simd_names; needs vectors matrices; tokens simd_char2 simd_char3 simd_char4 simd_uchar2 simd_uchar3 simd_uchar4 simd_short2 simd_short3 simd_short4 simd_ushort2 simd_ushort3 simd_ushort4 simd_int2 simd_int3 simd_int4 simd_uint2 simd_uint3 simd_uint4 simd_long2 simd_long3 simd_long4 simd_ulong2 simd_ulong3 simd_ulong4 simd_float2 simd_float3 simd_float4 vector_char2 vector_char3 vector_char4 vector_uchar2 vector_uchar3 vector_uchar4 vector_short2 vector_short3 vector_short4 vector_ushort2 vector_ushort3 vector_ushort4 vector_int2 vector_int3 vector_int4 vector_uint2 vector_uint3 vector_uint4 vector_long2 vector_long3 vector_long4 vector_ulong2 vector_ulong3 vector_ulong4 vector_float2 vector_float3 vector_float4 simd_float2x2 simd_float2x3 simd_float2x4 simd_float3x2 simd_float3x3 simd_float3x4 simd_float4x2 simd_float4x3 simd_float4x4 matrix_float2x2 matrix_float2x3 matrix_float2x4 matrix_float3x2 matrix_float3x3 matrix_float3x4 matrix_float4x2 matrix_float4x3 matrix_float4x4
// The names that <simd/simd.h>, which Metal shares with C, gives to vectors and matrices.

namespace metal {

#define ZK_SIMD_NAMES(T)      \
  using simd_##T##2 = T##2;   \
  using simd_##T##3 = T##3;   \
  using simd_##T##4 = T##4;   \
  using vector_##T##2 = T##2; \
  using vector_##T##3 = T##3; \
  using vector_##T##4 = T##4;
ZK_SIMD_NAMES(char)
ZK_SIMD_NAMES(uchar)
ZK_SIMD_NAMES(short)
ZK_SIMD_NAMES(ushort)
ZK_SIMD_NAMES(int)
ZK_SIMD_NAMES(uint)
ZK_SIMD_NAMES(long)
ZK_SIMD_NAMES(ulong)
ZK_SIMD_NAMES(float)
#undef ZK_SIMD_NAMES

#define ZK_SIMD_NAMES(C)             \
  using simd_##C##x2 = C##x2;        \
  using simd_##C##x3 = C##x3;        \
  using simd_##C##x4 = C##x4;        \
  using matrix_##C##x2 = C##x2;      \
  using matrix_##C##x3 = C##x3;      \
  using matrix_##C##x4 = C##x4;
ZK_SIMD_NAMES(float2)
ZK_SIMD_NAMES(float3)
ZK_SIMD_NAMES(float4)
#undef ZK_SIMD_NAMES

}  // namespace metal
