// The kernels of one instruction set. This file is compiled once per set, with its flags, FUSEWRIGHT_SET (the name of its table)
// and FUSEWRIGHT_VECTORS (the header of its vectors). Everything else here has internal linkage: the linker could merge functions
// with external linkage with those of another set, which this CPU may not run.
#include FUSEWRIGHT_VECTORS

#include "depthwise.h"
#include "gemm.h"
#include "rows.h"
#include "weight.h"

// Tiles multiply ten times as fast as they could fetch weights for 128 rows. CPUs that have them have a second-level cache of 2 MiB.
#ifdef FUSEWRIGHT_TILES
#include FUSEWRIGHT_TILES
#include "tiles.h"
#define FUSEWRIGHT_GEMM tile_gemm<Vec, Tiles>
#define FUSEWRIGHT_BLOCK kTileRows, kTileColumns, 256, i64{1} << 19
#else
#define FUSEWRIGHT_GEMM gemm<Vec>
#define FUSEWRIGHT_BLOCK Vec::MR[Vec::NV], kPanel, 128, i64{1} << 18
#endif

#define FUSEWRIGHT_TEXT_OF(x) #x
#define FUSEWRIGHT_TEXT(x) FUSEWRIGHT_TEXT_OF(x)

namespace fusewright::int8 {

extern const Kernels FUSEWRIGHT_SET;
const Kernels FUSEWRIGHT_SET = {
    FUSEWRIGHT_TEXT(FUSEWRIGHT_SET), FUSEWRIGHT_BLOCK, FUSEWRIGHT_GEMM, weight_gemm<Vec>, depthwise<Vec>,
    range<Vec>,                      quantize<Vec>,    quantize64<Vec>, split<Vec>, split_bytes<Vec>,
};

}  // namespace fusewright::int8
