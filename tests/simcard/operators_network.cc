// Convolution, pooling, normalisation, losses, and what draws random numbers.
#include "launch.h"
#include "paddle/phi/kernels/batch_norm_grad_kernel.h"
#include "paddle/phi/kernels/batch_norm_kernel.h"
#include "paddle/phi/kernels/conv_grad_kernel.h"
#include "paddle/phi/kernels/conv_kernel.h"
#include "paddle/phi/kernels/conv_transpose_grad_kernel.h"
#include "paddle/phi/kernels/conv_transpose_kernel.h"
#include "paddle/phi/kernels/cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_kernel.h"
#include "paddle/phi/kernels/dropout_grad_kernel.h"
#include "paddle/phi/kernels/dropout_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/gaussian_kernel.h"
#include "paddle/phi/kernels/group_norm_grad_kernel.h"
#include "paddle/phi/kernels/group_norm_kernel.h"
#include "paddle/phi/kernels/interpolate_grad_kernel.h"
#include "paddle/phi/kernels/interpolate_kernel.h"
#include "paddle/phi/kernels/label_smooth_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/log_softmax_grad_kernel.h"
#include "paddle/phi/kernels/log_softmax_kernel.h"
#include "paddle/phi/kernels/nll_loss_grad_kernel.h"
#include "paddle/phi/kernels/nll_loss_kernel.h"
#include "paddle/phi/kernels/pool_grad_kernel.h"
#include "paddle/phi/kernels/pool_kernel.h"
#include "paddle/phi/kernels/randint_kernel.h"
#include "paddle/phi/kernels/sigmoid_cross_entropy_with_logits_grad_kernel.h"
#include "paddle/phi/kernels/sigmoid_cross_entropy_with_logits_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/truncated_gaussian_random_kernel.h"
#include "paddle/phi/kernels/uniform_kernel.h"

namespace sim {

void RegisterNetwork() {
  SIM_KERNEL(conv2d, SIM_SIGNATURE(ConvKernel));
  SIM_KERNEL(conv2d_grad, SIM_SIGNATURE(ConvGradKernel));
  SIM_KERNEL(depthwise_conv2d, SIM_SIGNATURE(DepthwiseConvKernel));
  SIM_KERNEL(depthwise_conv2d_grad, SIM_SIGNATURE(DepthwiseConvGradKernel));
  SIM_KERNEL(conv2d_transpose, SIM_SIGNATURE(Conv2dTransposeKernel));
  SIM_KERNEL(conv2d_transpose_grad, SIM_SIGNATURE(Conv2dTransposeGradKernel));
  SIM_KERNEL(pool2d, SIM_SIGNATURE(Pool2dKernel));
  SIM_KERNEL(pool2d_grad, SIM_SIGNATURE(Pool2dGradKernel));
  SIM_KERNEL(batch_norm, SIM_SIGNATURE(BatchNormKernel));
  SIM_KERNEL(batch_norm_grad, SIM_SIGNATURE(BatchNormGradKernel));
  SIM_KERNEL(batch_norm_infer, SIM_SIGNATURE(BatchNormInferKernel));
  SIM_KERNEL(layer_norm, SIM_SIGNATURE(LayerNormKernel));
  SIM_KERNEL(layer_norm_grad, SIM_SIGNATURE(LayerNormGradKernel));
  SIM_KERNEL(group_norm, SIM_SIGNATURE(GroupNormKernel));
  SIM_KERNEL(group_norm_grad, SIM_SIGNATURE(GroupNormGradKernel));
  SIM_KERNEL(softmax, SIM_SIGNATURE(SoftmaxKernel));
  SIM_KERNEL(softmax_grad, SIM_SIGNATURE(SoftmaxGradKernel));
  SIM_KERNEL(log_softmax, SIM_SIGNATURE(LogSoftmaxKernel));
  SIM_KERNEL(log_softmax_grad, SIM_SIGNATURE(LogSoftmaxGradKernel));
  SIM_KERNEL(cross_entropy_with_softmax, SIM_SIGNATURE(CrossEntropyWithSoftmaxKernel));
  SIM_KERNEL(cross_entropy_with_softmax_grad, SIM_SIGNATURE(CrossEntropyWithSoftmaxGradKernel));
  SIM_KERNEL(nll_loss, SIM_SIGNATURE(NllLossRawKernel));
  SIM_KERNEL(nll_loss_grad, SIM_SIGNATURE(NllLossGradKernel));
  SIM_KERNEL(sigmoid_cross_entropy_with_logits, SIM_SIGNATURE(SigmoidCrossEntropyWithLogitsKernel));
  SIM_KERNEL(sigmoid_cross_entropy_with_logits_grad, SIM_SIGNATURE(SigmoidCrossEntropyWithLogitsGradKernel));
  SIM_KERNEL(label_smooth, SIM_SIGNATURE(LabelSmoothKernel));
  SIM_KERNEL(embedding, SIM_SIGNATURE(EmbeddingKernel));
  SIM_KERNEL(embedding_grad, SIM_SIGNATURE(EmbeddingGradKernel));
  SIM_KERNEL(bilinear_interp, SIM_SIGNATURE(BilinearInterpKernel));
  SIM_KERNEL(bilinear_interp_grad, SIM_SIGNATURE(BilinearInterpGradKernel));
  SIM_KERNEL(nearest_interp, SIM_SIGNATURE(NearestInterpKernel));
  SIM_KERNEL(nearest_interp_grad, SIM_SIGNATURE(NearestInterpGradKernel));
  SIM_KERNEL_WITH(Replays, dropout, SIM_SIGNATURE(DropoutRawKernel));
  SIM_KERNEL(dropout_grad, SIM_SIGNATURE(DropoutGradRawKernel));
  SIM_KERNEL_WITH(Creates, uniform, SIM_SIGNATURE(UniformKernel));
  SIM_KERNEL_WITH(Creates, gaussian, SIM_SIGNATURE(GaussianKernel));
  SIM_KERNEL_WITH(Creates, truncated_gaussian_random, SIM_SIGNATURE(TruncatedGaussianRandomKernel));
  SIM_KERNEL_WITH(Creates, randint, SIM_SIGNATURE(RandintKernel));
}

}  // namespace sim
