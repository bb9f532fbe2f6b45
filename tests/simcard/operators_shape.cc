// Kernels that move, select, fill and convert values.
#include "launch.h"
#include "paddle/phi/kernels/arange_kernel.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/eye_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/flatten_grad_kernel.h"
#include "paddle/phi/kernels/flatten_kernel.h"
#include "paddle/phi/kernels/flip_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_grad_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/index_select_grad_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/one_hot_kernel.h"
#include "paddle/phi/kernels/pad3d_grad_kernel.h"
#include "paddle/phi/kernels/pad3d_kernel.h"
#include "paddle/phi/kernels/pad_grad_kernel.h"
#include "paddle/phi/kernels/pad_kernel.h"
#include "paddle/phi/kernels/set_value_kernel.h"
#include "paddle/phi/kernels/slice_grad_kernel.h"
#include "paddle/phi/kernels/slice_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/squeeze_grad_kernel.h"
#include "paddle/phi/kernels/squeeze_kernel.h"
#include "paddle/phi/kernels/stack_grad_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"
#include "paddle/phi/kernels/strided_slice_grad_kernel.h"
#include "paddle/phi/kernels/strided_slice_kernel.h"
#include "paddle/phi/kernels/tile_grad_kernel.h"
#include "paddle/phi/kernels/tile_kernel.h"
#include "paddle/phi/kernels/transpose_grad_kernel.h"
#include "paddle/phi/kernels/transpose_kernel.h"
#include "paddle/phi/kernels/unsqueeze_grad_kernel.h"
#include "paddle/phi/kernels/unsqueeze_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace sim {
namespace {

// No InferMeta has been here: the kernels themselves say how their outputs lie in memory, so the launch must know.
struct ToContiguous : Plain {
  static constexpr bool kWritesParts = true;  // it does not, but reads parts
  static void Before(const phi::CustomContext&, In in, Out out) {
    phi::DenseTensorMeta meta = in.meta();
    meta.strides = phi::DenseTensorMeta::calc_strides(in.dims());
    meta.offset = 0;
    out->set_meta(meta);
  }
};

struct IntoStrides : Plain {
  static constexpr bool kWritesParts = true;
  static void Before(const phi::CustomContext&, In, const std::vector<int64_t>& dims,
                     const std::vector<int64_t>& strides, int64_t offset, Out out) {
    phi::DenseTensorMeta meta = out->meta();
    meta.dims = phi::make_ddim(dims);
    meta.strides = phi::make_ddim(strides);
    meta.offset = offset;
    out->set_meta(meta);
  }
};

// Paddle calls `full` for tensors without meta as well.
struct OfShape : Plain {
  static void Before(const phi::CustomContext&, const phi::IntArray& shape, const phi::Scalar&, DataType type, Out out) {
    phi::DenseTensorMeta meta(out->dtype() == DataType::UNDEFINED ? type : out->dtype(), phi::make_ddim(shape.GetData()));
    out->set_meta(meta);
  }
};

}  // namespace

void RegisterShapes() {
  SIM_KERNEL_WITH(ToContiguous, contiguous, SIM_SIGNATURE(ContiguousKernel));
  SIM_KERNEL_WITH(IntoStrides, strided_copy, SIM_SIGNATURE(StridedCopyKernel));
  SIM_KERNEL_WITH(OfShape, full, SIM_SIGNATURE(FullKernel));
  SIM_KERNEL(full_like, SIM_SIGNATURE(FullLikeKernel));
  SIM_KERNEL(arange, SIM_SIGNATURE(ArangeKernel));
  SIM_KERNEL(eye, SIM_SIGNATURE(EyeKernel));
  SIM_KERNEL(fill, SIM_SIGNATURE(FillKernel));
  SIM_KERNEL(set_value, SIM_SIGNATURE(SetValueKernel));
  SIM_KERNEL(set_value_with_tensor, SIM_SIGNATURE(SetTensorValueKernel));
  SIM_KERNEL(cast, SIM_SIGNATURE(CastKernel));
  SIM_KERNEL(assign, Unary);
  SIM_KERNEL(transpose, SIM_SIGNATURE(TransposeKernel));
  SIM_KERNEL(transpose_grad, SIM_SIGNATURE(TransposeGradKernel));
  SIM_KERNEL(concat, SIM_SIGNATURE(ConcatKernel));
  SIM_KERNEL(concat_grad, SIM_SIGNATURE(ConcatGradKernel));
  SIM_KERNEL(split, SIM_SIGNATURE(SplitKernel));
  SIM_KERNEL(split_with_num, SIM_SIGNATURE(SplitWithNumKernel));
  SIM_KERNEL(stack, SIM_SIGNATURE(StackKernel));
  SIM_KERNEL(stack_grad, SIM_SIGNATURE(StackGradKernel));
  SIM_KERNEL(slice, SIM_SIGNATURE(SliceKernel));
  SIM_KERNEL(slice_grad, SIM_SIGNATURE(SliceGradKernel));
#if SIM_PADDLE_MAJOR < 3  // later ones make views, without a kernel
  SIM_KERNEL(flatten, SIM_SIGNATURE(FlattenKernel));
  SIM_KERNEL(flatten_grad, SIM_SIGNATURE(FlattenGradKernel));
  SIM_KERNEL(squeeze, SIM_SIGNATURE(SqueezeKernel));
  SIM_KERNEL(squeeze_grad, SIM_SIGNATURE(SqueezeGradKernel));
  SIM_KERNEL(unsqueeze, SIM_SIGNATURE(UnsqueezeKernel));
  SIM_KERNEL(unsqueeze_grad, SIM_SIGNATURE(UnsqueezeGradKernel));
#endif
  SIM_KERNEL(strided_slice, SIM_SIGNATURE(StridedSliceKernel));
  SIM_KERNEL(strided_slice_grad, SIM_SIGNATURE(StridedSliceGradKernel));
  SIM_KERNEL(expand, SIM_SIGNATURE(ExpandKernel));
  SIM_KERNEL(expand_grad, SIM_SIGNATURE(ExpandGradKernel));
  SIM_KERNEL(tile, SIM_SIGNATURE(TileKernel));
  SIM_KERNEL(tile_grad, SIM_SIGNATURE(TileGradKernel));
  SIM_KERNEL(flip, SIM_SIGNATURE(FlipKernel));
  SIM_KERNEL(cumsum, SIM_SIGNATURE(CumsumKernel));
  SIM_KERNEL(pad, SIM_SIGNATURE(PadKernel));
  SIM_KERNEL(pad_grad, SIM_SIGNATURE(PadGradKernel));
  SIM_KERNEL(pad3d, SIM_SIGNATURE(Pad3dKernel));
  SIM_KERNEL(pad3d_grad, SIM_SIGNATURE(Pad3dGradKernel));
  SIM_KERNEL(where, SIM_SIGNATURE(WhereKernel));
  SIM_KERNEL(where_grad, SIM_SIGNATURE(WhereGradKernel));
  SIM_KERNEL(gather, SIM_SIGNATURE(GatherKernel));
  SIM_KERNEL(gather_grad, SIM_SIGNATURE(GatherGradKernel));
  SIM_KERNEL(index_select, SIM_SIGNATURE(IndexSelectKernel));
  SIM_KERNEL(index_select_grad, SIM_SIGNATURE(IndexSelectGradKernel));
  SIM_KERNEL(one_hot, SIM_SIGNATURE(OneHotKernel));
}

}  // namespace sim
