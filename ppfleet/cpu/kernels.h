// The kernels' table: one for each instruction set that kernels.inc is compiled for. Planes are NCHW, float32.
#pragma once
#include <cstdint>

namespace ppfleet {

enum Act { kNone = 0, kRelu = 1, kHardswish = 2 };

struct Shape {  // of a batch of planes, and of what a convolution makes of them
  int batch, channels, height, width;
  int kernel = 1, stride = 1, padding = 0, out_height = 0, out_width = 0;
};

struct BatchNorm {  // one float a channel
  Act act;
  bool batch_statistics;  // or the running ones
  float momentum, epsilon;
  const float *scale, *bias;
  float *running_mean, *running_variance;
  float *a, *b, *mean, *sharp;  // what the gradient needs: y = act(x a + b), the mean, and 1 / deviation
};

struct Moments {  // of a plane: its mean, and the sum of squares around it
  double mean, squares;
};

struct Line {
  float slope, offset;
};

struct Kernels {
  // z = the convolution of x and, where there is a `norm`, y = act(batch norm of z); its gradient.
  void (*depthwise)(const Shape&, const float* x, const float* w, float* z, const BatchNorm* norm, float* y);
  void (*depthwise_grad)(const Shape&, const float* x, const float* w, const BatchNorm* norm, const float* z,
                         const float* dy, float* dx, float* dw, float* dscale, float* dbias);
  // y = act(batch norm of x)
  void (*batch_norm)(const Shape&, const BatchNorm&, const float* x, float* y);
  void (*batch_norm_grad)(const Shape&, const BatchNorm&, const float* x, const float* dy, float* dx, float* dscale,
                          float* dbias);
  // The same in parts, by one thread: a plane's moments; from those of the planes of channel c, `step` apart, to what
  // is in BatchNorm; a plane of y. For the gradient, the sums over a channel; a plane of dx.
  Moments (*moments)(int size, const float* x);
  void (*settle)(const BatchNorm&, int c, int planes, int size, const Moments* of, int step);
  void (*norm_plane)(const BatchNorm&, int c, int size, const float* x, float* y);
  Line (*norm_sums)(const BatchNorm&, int c, int planes, int size, int64_t step, const float* x, const float* dy,
                    float* dscale, float* dbias);
  void (*norm_plane_grad)(const BatchNorm&, int c, Line, int size, const float* x, const float* dy, float* dx);
  void (*plane_means)(int64_t planes, int size, const float* x, float* mean);
  // y = x * scale, one scale a plane
  void (*scale)(int64_t planes, int size, const float* x, const float* scale, float* y);
  // the sum of x * dy of each plane
  void (*plane_products)(int64_t planes, int size, const float* x, const float* dy, float* sum);
  // dx = dy * scale + offset, one of each a plane
  void (*scale_grad)(int64_t planes, int size, const float* dy, const float* scale, const float* offset, float* dx);
  // For a dense convolution: an image with its border, and for `rows` rows of the output from `first` on, what each
  // weight is multiplied with, one line a weight.
  int64_t (*padded_floats)(const Shape&);  // of one channel
  void (*pad)(const Shape&, const float* x, float* padded);
  void (*columns)(const Shape&, const float* padded, int first, int rows, float* lines);
  // From images of `channels` planes to one row a channel, all images in it, and back.
  void (*gather)(const float* x, int images, int channels, int size, float* rows);
  void (*scatter)(const float* rows, int images, int channels, int size, float* x);
  // `count` pixels of three colours to a plane of each: times its scale, less its shift. Not in every table.
  void (*planes)(int64_t count, const uint8_t* pixels, const float* scale, const float* shift, float* out);
  bool (*finite)(int64_t count, const float* x);
};

extern const Kernels kPortable, kAvx2;

}  // namespace ppfleet
