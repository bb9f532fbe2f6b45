// The kernels for any processor.
#define TABLE kPortable
#include "kernels.inc"
