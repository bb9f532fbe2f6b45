// The kernels for processors with AVX2 and FMA, as nearly all of the last ten years have.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#endif
#define TABLE kAvx2
#define MODERN 1
#include "kernels.inc"
