// Kernels of one tensor, element by element, with their gradients.
#include "launch.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/clip_grad_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"

namespace sim {

void RegisterActivations() {
  SIM_KERNEL(relu, Unary);
  SIM_KERNEL(relu_grad, Binary);
  SIM_KERNEL(relu6, SIM_SIGNATURE(Relu6Kernel));
  SIM_KERNEL(relu6_grad, Binary);
  SIM_KERNEL(leaky_relu, SIM_SIGNATURE(LeakyReluKernel));
  SIM_KERNEL(leaky_relu_grad, SIM_SIGNATURE(LeakyReluGradKernel));
  SIM_KERNEL(hardswish, SIM_SIGNATURE(HardSwishKernel));
  SIM_KERNEL(hardswish_grad, SIM_SIGNATURE(HardSwishGradKernel));
  SIM_KERNEL(hardsigmoid, SIM_SIGNATURE(HardSigmoidKernel));
  SIM_KERNEL(hardsigmoid_grad, SIM_SIGNATURE(HardSigmoidGradKernel));
  SIM_KERNEL(sigmoid, Unary);
  SIM_KERNEL(sigmoid_grad, Binary);
  SIM_KERNEL(tanh, Unary);
  SIM_KERNEL(tanh_grad, Binary);
  SIM_KERNEL(gelu, SIM_SIGNATURE(GeluKernel));
  SIM_KERNEL(gelu_grad, SIM_SIGNATURE(GeluGradKernel));
  SIM_KERNEL(silu, Unary);
  SIM_KERNEL(silu_grad, Signature<In, In, In, Out>);
  SIM_KERNEL(swish, SIM_SIGNATURE(SwishKernel));
  SIM_KERNEL(swish_grad, Binary);
  SIM_KERNEL(mish, SIM_SIGNATURE(MishKernel));
  SIM_KERNEL(mish_grad, SIM_SIGNATURE(MishGradKernel));
  SIM_KERNEL(softplus, SIM_SIGNATURE(SoftplusKernel));
  SIM_KERNEL(softplus_grad, SIM_SIGNATURE(SoftplusGradKernel));
  SIM_KERNEL(elu, SIM_SIGNATURE(EluKernel));
  SIM_KERNEL(elu_grad, SIM_SIGNATURE(EluGradKernel));
  SIM_KERNEL(sqrt, Unary);
  SIM_KERNEL(sqrt_grad, Binary);
  SIM_KERNEL(rsqrt, Unary);
  SIM_KERNEL(rsqrt_grad, Binary);
  SIM_KERNEL(square, Unary);
  SIM_KERNEL(square_grad, Binary);
  SIM_KERNEL(abs, Unary);
  SIM_KERNEL(abs_grad, Binary);
  SIM_KERNEL(exp, Unary);
  SIM_KERNEL(exp_grad, Binary);
  SIM_KERNEL(log, Unary);
  SIM_KERNEL(log_grad, Binary);
  SIM_KERNEL(sin, Unary);
  SIM_KERNEL(sin_grad, Binary);
  SIM_KERNEL(cos, Unary);
  SIM_KERNEL(cos_grad, Binary);
  SIM_KERNEL(floor, Unary);
  SIM_KERNEL(ceil, Unary);
  SIM_KERNEL(sign, Unary);
  SIM_KERNEL(reciprocal, Unary);
  SIM_KERNEL(reciprocal_grad, Binary);
  SIM_KERNEL(pow, SIM_SIGNATURE(PowKernel));
  SIM_KERNEL(pow_grad, SIM_SIGNATURE(PowGradKernel));
  SIM_KERNEL(clip, SIM_SIGNATURE(ClipKernel));
  SIM_KERNEL(clip_grad, SIM_SIGNATURE(ClipGradKernel));
  SIM_KERNEL(isfinite, Unary);
  SIM_KERNEL(isnan, Unary);
  SIM_KERNEL(isinf, Unary);
  SIM_KERNEL(logical_not, Unary);
  SIM_KERNEL(bitwise_not, Unary);
}

}  // namespace sim
