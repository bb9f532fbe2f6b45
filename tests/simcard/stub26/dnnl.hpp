// Paddle 2.6's DenseTensor holds a memory::desc of oneDNN, whose headers the wheel lacks. Only the size matters: in
// oneDNN 3 these classes are a shared pointer.
#pragma once
#include <memory>

namespace dnnl {
struct engine {
  std::shared_ptr<void> handle;
};
struct stream {
  std::shared_ptr<void> handle;
};
struct memory {
  enum class format_tag { undef };
  enum class data_type { undef };
  struct desc {
    std::shared_ptr<void> handle;
  };
};
}  // namespace dnnl
