// The kernels for any processor.
#define TABLE kPortable
#define MODERN 0
#include "kernels.inc"
