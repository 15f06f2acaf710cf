/* A C interface to what zmlx's Zig front end needs of MLX: arrays, kernels from Metal source, and
 * a few operations around them.
 *
 * Every function that can fail returns a status; the text of the last failure on this thread is
 * `zmlx_error_message()`. No C++ exception leaves a function. A pointer that a function gives out
 * in its last argument belongs to the caller, who gives it to the matching `_destroy`; destroying
 * null is allowed. Arrays are lazy, reference-counted values: destroying an array never invalidates
 * another one. Shapes are lists of `int32_t`.
 */
#ifndef ZMLX_SHIM_H
#define ZMLX_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ZMLX_API __attribute__((visibility("default")))
#else
#define ZMLX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zmlx_array zmlx_array;
typedef struct zmlx_metal_kernel zmlx_metal_kernel;

typedef enum zmlx_status {
  ZMLX_OK = 0,
  ZMLX_INVALID_ARGUMENT = 1,
  ZMLX_OUT_OF_MEMORY = 2,
  ZMLX_FAILURE = 3, /* a compiler, a kernel, MLX */
} zmlx_status;

typedef enum zmlx_dtype {
  ZMLX_BOOL,
  ZMLX_UINT8,
  ZMLX_UINT16,
  ZMLX_UINT32,
  ZMLX_UINT64,
  ZMLX_INT8,
  ZMLX_INT16,
  ZMLX_INT32,
  ZMLX_INT64,
  ZMLX_FLOAT16,
  ZMLX_BFLOAT16,
  ZMLX_FLOAT32,
  ZMLX_FLOAT64,
  ZMLX_COMPLEX64,
} zmlx_dtype;

typedef enum zmlx_device {
  ZMLX_CPU,
  ZMLX_GPU,
} zmlx_device;

/* A stream is a value; it lives as long as the thread that made it. */
typedef struct zmlx_stream {
  int32_t index;
  int32_t device;
  int32_t device_index;
} zmlx_stream;

/* Text that need not end in a zero. */
typedef struct zmlx_text {
  const char* data;
  size_t size;
} zmlx_text;

/* ---- process --------------------------------------------------------------------------------- */

/* What went wrong in the last call on this thread that failed; empty before. */
ZMLX_API const char* zmlx_error_message(void);
/* Makes `text` the message: for callers that check something before they call. */
ZMLX_API void zmlx_set_error_message(zmlx_text text);
/* The version of MLX. */
ZMLX_API const char* zmlx_mlx_version(void);
/* Where kernels run: ZMLX_GPU through `mx::fast::metal_kernel`, ZMLX_CPU through zmlx's core. */
ZMLX_API zmlx_device zmlx_target(void);

ZMLX_API zmlx_status zmlx_default_stream(zmlx_device, zmlx_stream*);
ZMLX_API zmlx_status zmlx_new_stream(zmlx_device, zmlx_stream*);
/* Waits for all that was given to the stream. */
ZMLX_API zmlx_status zmlx_synchronize(const zmlx_stream*);

/* ---- arrays ---------------------------------------------------------------------------------- */

/* Copies row-major `data`. */
ZMLX_API zmlx_status zmlx_array_from_float32(const float* data, const int32_t* shape, size_t ndim,
                                             zmlx_array**);
ZMLX_API zmlx_status zmlx_array_from_data(const void* data, zmlx_dtype, const int32_t* shape,
                                          size_t ndim, zmlx_array**);
ZMLX_API zmlx_status zmlx_array_zeros(zmlx_dtype, const int32_t* shape, size_t ndim, zmlx_array**);
/* Another reference to the same array. */
ZMLX_API zmlx_status zmlx_array_copy(const zmlx_array*, zmlx_array**);
ZMLX_API void zmlx_array_destroy(zmlx_array*);

ZMLX_API size_t zmlx_array_ndim(const zmlx_array*);
/* `ndim` numbers, which live as long as the array. */
ZMLX_API const int32_t* zmlx_array_shape(const zmlx_array*);
ZMLX_API size_t zmlx_array_size(const zmlx_array*);
ZMLX_API zmlx_dtype zmlx_array_dtype(const zmlx_array*);
ZMLX_API size_t zmlx_dtype_size(zmlx_dtype);
/* The dtype of an operation on both. */
ZMLX_API zmlx_status zmlx_promote(zmlx_dtype, zmlx_dtype, zmlx_dtype*);

ZMLX_API zmlx_status zmlx_array_eval(zmlx_array* const* arrays, size_t count);
/* Evaluates, and copies the elements in row-major order to `to`, which holds `size` bytes. */
ZMLX_API zmlx_status zmlx_array_to_data(zmlx_array*, void* to, size_t size);

/* On `stream`, or the default one for null. */
ZMLX_API zmlx_status zmlx_array_astype(const zmlx_array*, zmlx_dtype, const zmlx_stream*,
                                       zmlx_array**);
ZMLX_API zmlx_status zmlx_array_reshape(const zmlx_array*, const int32_t* shape, size_t ndim,
                                        const zmlx_stream*, zmlx_array**);
ZMLX_API zmlx_status zmlx_array_broadcast_to(const zmlx_array*, const int32_t* shape, size_t ndim,
                                             const zmlx_stream*, zmlx_array**);
/* The axes in the opposite order. */
ZMLX_API zmlx_status zmlx_array_transpose(const zmlx_array*, const zmlx_stream*, zmlx_array**);
/* Over all axes. */
ZMLX_API zmlx_status zmlx_array_sum(const zmlx_array*, const zmlx_stream*, zmlx_array**);
ZMLX_API zmlx_status zmlx_array_mean(const zmlx_array*, const zmlx_stream*, zmlx_array**);
ZMLX_API zmlx_status zmlx_array_multiply(const zmlx_array*, const zmlx_array*, const zmlx_stream*,
                                         zmlx_array**);
ZMLX_API zmlx_status zmlx_array_divide(const zmlx_array*, const zmlx_array*, const zmlx_stream*,
                                       zmlx_array**);
ZMLX_API zmlx_status zmlx_array_not_equal(const zmlx_array*, const zmlx_array*, const zmlx_stream*,
                                          zmlx_array**);
ZMLX_API zmlx_status zmlx_array_matmul(const zmlx_array*, const zmlx_array*, const zmlx_stream*,
                                       zmlx_array**);

/* ---- kernels --------------------------------------------------------------------------------- */

/* What `mx.fast.metal_kernel` takes when a kernel is made. */
typedef struct zmlx_kernel_spec {
  zmlx_text name;
  const zmlx_text* input_names;
  size_t input_count;
  const zmlx_text* output_names;
  size_t output_count;
  zmlx_text source;
  zmlx_text header;
  bool ensure_row_contiguous;
  bool atomic_outputs;
  zmlx_text math_mode; /* "safe", "relaxed" or "fast" */
} zmlx_kernel_spec;

typedef enum zmlx_template_kind {
  ZMLX_TEMPLATE_INT,
  ZMLX_TEMPLATE_BOOL,
  ZMLX_TEMPLATE_DTYPE,
} zmlx_template_kind;

typedef struct zmlx_template_argument {
  zmlx_text name;
  int32_t kind;
  int32_t value;
} zmlx_template_argument;

/* What it takes at a call. */
typedef struct zmlx_kernel_call {
  const zmlx_array* const* inputs;
  size_t input_count;
  const zmlx_template_argument* template_arguments;
  size_t template_count;
  int32_t grid[3];
  int32_t threadgroup[3];
  const int32_t* const* output_shapes;
  const size_t* output_ndims;
  const zmlx_dtype* output_dtypes;
  size_t output_count;
  const float* init_value;   /* what outputs are filled with first, or null */
  const zmlx_stream* stream; /* null: the default one of the target */
} zmlx_kernel_call;

ZMLX_API zmlx_status zmlx_metal_kernel_create(const zmlx_kernel_spec*, zmlx_metal_kernel**);
/* A lazy launch, compiled at the first of its kind. Fills `outputs` with one array each. */
ZMLX_API zmlx_status zmlx_metal_kernel_call(zmlx_metal_kernel*, const zmlx_kernel_call*,
                                            zmlx_array** outputs);
/* Launches of the kernel that have not run yet still will. */
ZMLX_API void zmlx_metal_kernel_destroy(zmlx_metal_kernel*);

#ifdef __cplusplus
}
#endif
#endif
