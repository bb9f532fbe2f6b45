// Arithmetic of several tensors, reductions, comparisons, products of matrices.
#include "launch.h"
#include "paddle/phi/kernels/add_n_kernel.h"
#include "paddle/phi/kernels/addmm_grad_kernel.h"
#include "paddle/phi/kernels/addmm_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/bmm_grad_kernel.h"
#include "paddle/phi/kernels/bmm_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/mean_all_grad_kernel.h"
#include "paddle/phi/kernels/mean_all_kernel.h"
#include "paddle/phi/kernels/p_norm_grad_kernel.h"
#include "paddle/phi/kernels/p_norm_kernel.h"
#include "paddle/phi/kernels/reduce_all_kernel.h"
#include "paddle/phi/kernels/reduce_max_grad_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_grad_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"
#include "paddle/phi/kernels/top_k_grad_kernel.h"
#include "paddle/phi/kernels/top_k_kernel.h"

namespace sim {

void RegisterMath() {
  SIM_KERNEL(add, Binary);
  SIM_KERNEL(add_grad, SIM_SIGNATURE(AddGradKernel));
  SIM_KERNEL(subtract, Binary);
  SIM_KERNEL(subtract_grad, SIM_SIGNATURE(SubtractGradKernel));
  SIM_KERNEL(multiply, Binary);
  SIM_KERNEL(multiply_grad, SIM_SIGNATURE(MultiplyGradKernel));
  SIM_KERNEL(divide, Binary);
  SIM_KERNEL(divide_grad, SIM_SIGNATURE(DivideGradKernel));
  SIM_KERNEL(maximum, Binary);
  SIM_KERNEL(maximum_grad, SIM_SIGNATURE(MaximumGradKernel));
  SIM_KERNEL(minimum, Binary);
  SIM_KERNEL(minimum_grad, SIM_SIGNATURE(MinimumGradKernel));
  SIM_KERNEL(elementwise_pow, Binary);
  SIM_KERNEL(elementwise_pow_grad, SIM_SIGNATURE(ElementwisePowGradKernel));
  SIM_KERNEL(floor_divide, Binary);
  SIM_KERNEL(remainder, Binary);
  SIM_KERNEL(add_n, SIM_SIGNATURE(AddNKernel));
  SIM_KERNEL(scale, SIM_SIGNATURE(ScaleKernel));
  SIM_KERNEL(equal, Binary);
  SIM_KERNEL(not_equal, Binary);
  SIM_KERNEL(less_than, Binary);
  SIM_KERNEL(less_equal, Binary);
  SIM_KERNEL(greater_than, Binary);
  SIM_KERNEL(greater_equal, Binary);
  SIM_KERNEL(logical_and, Binary);
  SIM_KERNEL(logical_or, Binary);
  SIM_KERNEL(logical_xor, Binary);
  SIM_KERNEL(bitwise_and, Binary);
  SIM_KERNEL(bitwise_or, Binary);
  SIM_KERNEL(bitwise_xor, Binary);
  SIM_KERNEL(sum, SIM_SIGNATURE(SumKernel));
  SIM_KERNEL(sum_grad, SIM_SIGNATURE(ReduceSumGradKernel));
  SIM_KERNEL(mean, SIM_SIGNATURE(MeanKernel));
  SIM_KERNEL(mean_grad, SIM_SIGNATURE(ReduceMeanGradKernel));
  SIM_KERNEL(mean_all, SIM_SIGNATURE(MeanAllKernel));
  SIM_KERNEL(mean_all_grad, SIM_SIGNATURE(MeanAllGradKernel));
  SIM_KERNEL(max, SIM_SIGNATURE(MaxKernel));
  SIM_KERNEL(max_grad, SIM_SIGNATURE(ReduceMaxGradKernel));
  SIM_KERNEL(min, SIM_SIGNATURE(MinKernel));
  SIM_KERNEL(all, SIM_SIGNATURE(AllKernel));
  SIM_KERNEL(any, SIM_SIGNATURE(AllKernel));  // has the arguments of `all`
  SIM_KERNEL(argmax, SIM_SIGNATURE(ArgMaxKernel));
  SIM_KERNEL(argmin, SIM_SIGNATURE(ArgMinKernel));
  SIM_KERNEL(topk, SIM_SIGNATURE(TopkKernel));
  SIM_KERNEL(topk_grad, SIM_SIGNATURE(TopkGradKernel));
  SIM_KERNEL(squared_l2_norm, SIM_SIGNATURE(SquaredL2NormKernel));
  SIM_KERNEL(p_norm, SIM_SIGNATURE(PNormKernel));
  SIM_KERNEL(p_norm_grad, SIM_SIGNATURE(PNormGradKernel));
  SIM_KERNEL(matmul, SIM_SIGNATURE(MatmulKernel));
  SIM_KERNEL(matmul_grad, SIM_SIGNATURE(MatmulGradKernel));
  SIM_KERNEL(matmul_with_flatten, SIM_SIGNATURE(MatmulWithFlattenKernel));
  SIM_KERNEL(matmul_with_flatten_grad, SIM_SIGNATURE(MatmulWithFlattenGradKernel));
  SIM_KERNEL(addmm, SIM_SIGNATURE(AddmmKernel));
  SIM_KERNEL(addmm_grad, SIM_SIGNATURE(AddmmGradKernel));
  SIM_KERNEL(bmm, SIM_SIGNATURE(BmmKernel));
  SIM_KERNEL(bmm_grad, SIM_SIGNATURE(BmmGradKernel));
}

}  // namespace sim
