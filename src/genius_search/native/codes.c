/* Codes of items: for each vector x, the sum of code vectors, one of each level, that is nearest to
   it

   For a path with the sum s, the error |x - s|^2 / 2 - |x|^2 / 2 grows by |e|^2 / 2 - x·e + s·e if
   the code vector e follows. Beam search keeps the paths with the smallest errors. */

static inline uint32_t mask_smaller(const float *x,
                                    float than) { /* bits of the first LANES numbers */
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(than), _CMP_LT_OQ);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps(
      _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_set1_ps(than), _CMP_LT_OQ));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(x[lane] < than) << lane;
  return bits;
#endif
}

/* Write the positions of the smallest of n numbers, and these numbers, in ascending order; of equal
   numbers the first is kept. Return their count: at most ``max_count``, without infinite numbers.
 */
static int64_t find_smallest(const float *x, int64_t n, int64_t max_count, int32_t *positions,
                             float *smallest) {
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += LANES) {
    uint32_t bits = mask_smaller(x + first, count < max_count ? INFINITY : smallest[max_count - 1]);
    for (; bits; bits &= bits - 1) {
      int64_t position = first + __builtin_ctz(bits),
              slot = count < max_count ? count : max_count - 1;
      if (count == max_count && x[position] >= smallest[slot]) continue;
      for (; slot && smallest[slot - 1] > x[position]; slot--)
        smallest[slot] = smallest[slot - 1], positions[slot] = positions[slot - 1];
      smallest[slot] = x[position];
      positions[slot] = (int32_t)position;
      if (count < max_count) count++;
    }
  }
  return count;
}

/* Find codes[n][levels] by beam search. VECTORS_PER_BATCH vectors are processed together, so that
   the products of a level stay in the cache. Return 1, or NO_MEMORY.

   products[n][levels][CODES]: x·e of the vectors and the code vectors.
   halves[levels][CODES]: |e|^2 / 2 of code vectors, infinite where a level has no such code.
   crossed: for each level, f·e of the earlier levels' code vectors f and the level's code vectors
   e: [earlier levels][CODES][CODES]. */
API int nearest_sums(const float *products, const float *halves, const float *crossed, int64_t n,
                     int64_t levels, int64_t beam, uint8_t *codes) {
  float *sums = malloc((size_t)(VECTORS_PER_BATCH * beam * CODES + 2 * VECTORS_PER_BATCH * beam) *
                       sizeof(float));
  int32_t *positions = malloc((size_t)beam * sizeof(int32_t));
  uint8_t *paths = malloc((size_t)((VECTORS_PER_BATCH + 1) * beam * levels));
  int64_t widths[VECTORS_PER_BATCH];
  float *errors = sums + VECTORS_PER_BATCH * beam * CODES;
  uint8_t *longer = paths + VECTORS_PER_BATCH * beam * levels;
  for (int64_t start = 0; start < n && sums && positions && paths; start += VECTORS_PER_BATCH) {
    int64_t rows = n - start < VECTORS_PER_BATCH ? n - start : VECTORS_PER_BATCH;
    const float *earlier = crossed;
    for (int64_t i = 0; i < rows; i++) widths[i] = 1, errors[i * beam] = 0;
    for (int64_t level = 0; level < levels; level++) {
      for (int64_t i = 0; i < rows; i++)
        for (int64_t b = 0; b < widths[i]; b++) {
          const float *vector_products = products + ((start + i) * levels + level) * CODES,
                      *half = halves + level * CODES;
          const uint8_t *path = paths + (i * beam + b) * levels;
          for (int64_t c = 0; c < CODES; c += 4 * LANES) {
            vec sum[4];
            for (int v = 0; v < 4; v++)
              sum[v] = *(const vec *)(half + c + v * LANES) + errors[i * beam + b] -
                       *(const vec *)(vector_products + c + v * LANES);
            for (int64_t before = 0; before < level; before++) {
              const float *crossed_row = earlier + (before * CODES + path[before]) * CODES + c;
              for (int v = 0; v < 4; v++) sum[v] += *(const vec *)(crossed_row + v * LANES);
            }
            memcpy(sums + (i * beam + b) * CODES + c, sum, sizeof sum);
          }
        }
      earlier += level * CODES * CODES;
      for (int64_t i = 0; i < rows; i++) {
        uint8_t *beam_paths = paths + i * beam * levels;
        widths[i] = find_smallest(sums + i * beam * CODES, widths[i] * CODES, beam, positions,
                                  errors + i * beam);
        for (int64_t b = 0; b < widths[i]; b++) {
          memcpy(longer + b * levels, beam_paths + positions[b] / CODES * levels, (size_t)level);
          longer[b * levels + level] = (uint8_t)(positions[b] % CODES);
        }
        memcpy(beam_paths, longer, (size_t)(widths[i] * levels));
      }
    }
    for (int64_t i = 0; i < rows; i++)
      memcpy(codes + (start + i) * levels, paths + i * beam * levels, (size_t)levels);
  }
  int has_memory = sums && positions && paths;
  free(sums), free(positions), free(paths);
  return has_memory ? 1 : NO_MEMORY;
}

/* Add each vector of vectors[n][dim] to the row of sums[][dim] that its code names. */
API void sum_by_code(const float *vectors, const int64_t *codes, int64_t n, int64_t dim,
                     float *sums) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < dim; d++) sums[codes[i] * dim + d] += vectors[i * dim + d];
}

/* Find the fine codes of residuals r[n][dim]: of each part of the dimensions the vector t, of 16,
   with the largest r·t - |t|^2 / 2; of equal ones the first.

   vectors[dim][16]: column c has the dimensions of the vector that code c of a part stands for.
   halves[parts][16]: |t|^2 / 2.
   ends[parts]: the end of each part's dimensions.
   codes[n][stride]: receives the codes of the parts. */
API void nearest_fine_codes(const float *residuals, const float *vectors, const float *halves,
                            const int32_t *ends, uint8_t *codes, int64_t n, int64_t dim,
                            int64_t parts, int64_t stride) {
  enum { VALUES = 16, VECS = VALUES / LANES };
  for (int64_t i = 0; i < n; i++, residuals += dim, codes += stride) {
    int32_t d = 0;
    for (int64_t part = 0; part < parts; part++) {
      float values[VALUES];
      vec scores[VECS];
      for (int v = 0; v < VECS; v++) scores[v] = -*(const vec *)(halves + part * VALUES + v * LANES);
      for (; d < ends[part]; d++)
        for (int v = 0; v < VECS; v++)
          scores[v] += residuals[d] * *(const vec *)(vectors + d * VALUES + v * LANES);
      memcpy(values, scores, sizeof values);
      uint8_t best = 0;
      for (uint8_t c = 1; c < VALUES; c++) best = values[c] > values[best] ? c : best;
      codes[part] = best;
    }
  }
}

/* Write to sums[n][dim] the vectors that fine codes stand for; see nearest_fine_codes(). */
API void sum_fine_codes(const uint8_t *codes, const float *vectors, const int32_t *ends, float *sums,
                        int64_t n, int64_t dim, int64_t parts, int64_t stride) {
  for (int64_t i = 0; i < n; i++, codes += stride, sums += dim) {
    int32_t d = 0;
    for (int64_t part = 0; part < parts; part++)
      for (; d < ends[part]; d++) sums[d] = vectors[d * 16 + codes[part]];
  }
}
