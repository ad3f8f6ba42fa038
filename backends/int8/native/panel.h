// The epilogue of a panel: the fast path of its results if they have one, else the exact one.
#pragma once

#include "gelu.h"

namespace fusewright::int8 {
namespace {

// The epilogue of one panel, prepared once for its columns. BEGINS: sums begin with `begin()`, minus the offsets unless each row has
// its own, instead of 0.
template <class V, bool FLIPS, bool BEGINS> class Ends {
 public:
  Ends(const Gemm& gemm, i64 first_, i64 count_) : g(gemm), first(first_), count(count_) {
    columns_of_panel<FLIPS>(columns, g, first, count);
    if (!g.per_row && ends_quickly(g.after)) levels.of(columns, g.after, count, g.k);
    if (!g.per_row) gelu.of(columns, g.after, count, g.k);
    if constexpr (BEGINS)
      if (!g.per_row) begin_with_offsets();
  }
  const std::int32_t* begin() const { return first_sums; }
  // Finish rows [row, row + rows); `sums` has rows of kPanel.
  void finish(i64 row, i64 rows, std::int32_t* sums) const {
    if (g.row_terms) take_terms(row, rows, sums);
    if (levels.usable) return finish_quickly<V, BEGINS>(g.after, columns, levels, row, rows, first, count, sums);
    if (gelu.usable) return finish_gelu<V, BEGINS>(g.after, columns, gelu, row, rows, first, count, sums);
    const bool plain = !g.after.residual && g.after.post == Post::none && size_of(g.after.out_type) > 1;
    auto end = g.per_row ? row_end<true>(plain) : row_end<false>(plain);
    for (i64 r = row; r < row + rows; ++r, sums += kPanel)
      end(g.after, columns, r, first, count, sums, g.per_row ? static_cast<double>(g.x_scale[r]) : 1.0,
          g.per_row ? zero_of<FLIPS>(g, r) : 1);
  }

 private:
  template <bool PER_ROW> auto row_end(bool plain) const {
    if (!plain) return finish_row<PER_ROW>;
    return g.after.out_type == Type::f32 ? finish_floats<V, Type::f32, PER_ROW> : finish_floats<V, Type::bf16, PER_ROW>;
  }
  template <bool PER_ROW>
  static void finish_row(const After& a, const Columns& c, i64 row, i64 first, i64 count, const std::int32_t* sums,
                         double row_scale, std::int32_t zero) {
    finish_exactly<V, PER_ROW>(a, c, row, first, 0, count, sums, row_scale, zero);
  }
  void begin_with_offsets() {
    for (i64 i = 0; i < round_up(count, kNarrow); ++i)
      first_sums[i] = static_cast<std::int32_t>(0u - static_cast<std::uint32_t>(columns.offset[i])), columns.offset[i] = 0;
  }
  void take_terms(i64 row, i64 rows, std::int32_t* sums) const {
    for (i64 r = row; r < row + rows; ++r, sums += kPanel)
      for (i64 j = 0; j < count; j += V::W) V::store(sums + j, V::sub(V::load(sums + j), V::set(g.row_terms[r])));
  }

  const Gemm& g;
  i64 first, count;
  Columns columns;
  Levels levels;
  GeluLevels gelu;
  alignas(64) std::int32_t first_sums[kPanel] = {};
};

}  // namespace
}  // namespace fusewright::int8
