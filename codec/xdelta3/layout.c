/* What codec/src/delta/xdelta3.rs declares by hand must be what the library was compiled with. */
#include "xdelta3.h"

_Static_assert(sizeof(usize_t) == 4, "usize_t is u32 in the declarations");
_Static_assert(SECONDARY_DJW == 0 && SECONDARY_FGK == 0, "secondary decompressors allocate what a patch says");

/* Compiled only if both have these types. */
int (*const storaged_xd3_encode)(const uint8_t *, usize_t, const uint8_t *, usize_t, uint8_t *, usize_t *, usize_t, int) = xd3_encode_memory;
int (*const storaged_xd3_decode)(const uint8_t *, usize_t, const uint8_t *, usize_t, uint8_t *, usize_t *, usize_t, int) = xd3_decode_memory;
