/* Ranking by embeddings

   Whole embeddings (16 bits): score = factor * (q · embedding) / |embedding|. Residuals of fewer
   bits:

     score = q · (vector of the ID) + scale * step * (rounded query · n)

   where n = 2 * stored - largest are odd integers, largest = 2^bits - 1, and step is the step of
   the rounded query. The density costs density_step * fade^3 * density, with fade = (1 - cosine) /
   fade_width between 0 and 1. */

/* Return rounded query · n = 2 * sum(stored * query) - largest * sum(query). Sums are taken modulo
   2^32, in which the result fits. */
static inline __attribute__((always_inline)) int32_t multiply_packed(const uint8_t *row,
                                                                     const Packed *p,
                                                                     const int bits) {
  uint32_t sum = 0;
  const int largest = (1 << bits) - 1;
#ifdef __AVX512VNNI__
  __m512i high = _mm512_setzero_si512(), low = high, mask = _mm512_set1_epi8((char)largest);
  for (int64_t i = 0; i < p->width; i += 64) {
    __mmask64 inside = p->width - i < 64 ? (1ull << (p->width - i)) - 1 : ~0ull;
    __m512i bytes = _mm512_maskz_loadu_epi8(inside, row + i);
    const int8_t *upper = p->upper + i, *lower = p->lower + i;
    for (int shift = 0; shift < 8; shift += bits, upper += p->stride, lower += p->stride) {
      __m512i numbers = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(shift)), mask);
      high = _mm512_dpbusd_epi32(high, numbers, _mm512_loadu_si512(upper));
      low = _mm512_dpbusd_epi32(low, numbers, _mm512_loadu_si512(lower));
    }
  }
  sum = ((uint32_t)_mm512_reduce_add_epi32(high) << 8) + (uint32_t)_mm512_reduce_add_epi32(low);
#else
  const int16_t *query = p->query;
  for (int shift = 0; shift < 8; shift += bits, query += p->stride)
    for (int64_t i = 0; i < p->width; i++)
      sum += (uint32_t)((int16_t)(row[i] >> shift & largest) * query[i]);
#endif
  return (int32_t)(2 * sum - (uint32_t)largest * (uint32_t)p->sum);
}

/* Return the product of the query and the vector of a hit's ID. */
static float multiply_hit_id(const Model *m, const Work *w, const Hit *hit) {
  const Table *table = w->parts[hit->part].table;
  const float *products = w->products.at;
  const uint8_t *id = table->ids + hit->row * table->columns;
  float sums[2] = {0};
  for (int64_t l = 0; l < m->levels; l++) sums[l & 1] += products[l * CODES + id[l]];
  return sums[0] + sums[1];
}

/* Return the query for residuals: without the directions in which items do not differ, and with the
   weight of each dimension, which corrects for rounding (Residuals in nn/spread.py). */
static const float *weigh_query(const Model *m, const Work *w, const float *query, int bits) {
  const float *weights = m->residual_weights + (bits == 1   ? 0
                                                : bits == 2 ? 1
                                                : bits == 4 ? 2
                                                            : 3) *
                                                   m->dim;
  float *weighed = w->weighed.at;
  memcpy(weighed, query, (size_t)m->dim * sizeof(float));
  for (int64_t n = 0; n < m->num_constant; n++) {
    const float *direction = m->constant + n * m->dim;
    add_scaled(weighed, -dot(direction, query, m->dim), direction, m->dim);
  }
  for (int64_t i = 0; i < m->dim; i++) weighed[i] *= weights[i];
  return weighed;
}

/* Score n hits by their embeddings; for residuals, without the part of the IDs' vectors. The query
   for whole embeddings is not scaled by ``factor`` yet. Four hits at a time. */
static void score_embeddings(const Model *m, const Request *request, const float *query,
                             float factor, const Hit *hits, int64_t n, float *scores, Work *w) {
  int bits = (int)request->compared_bits;
  int64_t size = (m->dim * bits + 7) / 8;
  if (bits < 16) query = weigh_query(m, w, query, bits);
  float step =
      bits < 16 ? round_query(query, m->dim, (float)((1 << bits) - 1), w->short_query.at) : 0;
  Packed packed =
      bits < 16 ? pack_query(w->short_query.at, m->dim, bits, w->packed_query.at) : (Packed){0};
  for (int64_t i = 0; i < n; i += 4) {
    const uint8_t *rows[4];
    int32_t sums[4];
    for (int64_t j = 0; j < 4; j++) {
      const Hit *hit = hits + (i + j < n ? i + j : i);
      rows[j] = (const uint8_t *)w->parts[hit->part].embeddings + hit->item * size;
      if (i + j + 8 < n) {
        const Part *part = w->parts + hit[8].part;
        const uint8_t *next = (const uint8_t *)part->embeddings + hit[8].item * size;
        for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(next + byte);
        if (part->scales) __builtin_prefetch(part->scales + hit[8].item);
        if (part->lengths) __builtin_prefetch(part->lengths + hit[8].item);
        if (part->densities) __builtin_prefetch(part->densities + hit[8].item);
      }
      if (bits == 1) sums[j] = multiply_packed(rows[j], &packed, 1);
      if (bits == 2) sums[j] = multiply_packed(rows[j], &packed, 2);
      if (bits == 4) sums[j] = multiply_packed(rows[j], &packed, 4);
      if (bits == 8) sums[j] = multiply_packed(rows[j], &packed, 8);
    }
    for (int64_t j = 0; j < 4 && i + j < n; j++) {
      const Hit *hit = hits + i + j;
      const Part *part = w->parts + hit->part;
      scores[i + j] = bits < 16 ? (float)sums[j] * step * half_to_float(part->scales[hit->item])
                                : multiply_halves(rows[j], query, m->dim) * factor;
    }
  }
}

/* Return the cost of an item's density; ``product`` is its product with the query before scaling.
 */
static inline float find_density_cost(const Request *request, const Part *part, int64_t item,
                                      float product) {
  if (!part->densities) return 0;
  float share = (1 - product) / request->fade_width;
  share = share < 0 ? 0 : share > 1 ? 1 : share;
  return request->compared_density_step * share * share * share *
         (float)(part->densities[item] - ZERO_DENSITY);
}

/* Add to the product of a hit with its residual that with the codes' vectors, and subtract the cost
   of its density. */
static inline float complete_score(const Model *m, const Request *request, Work *w, const Hit *hit,
                                   float score, float factor) {
  const Part *part = w->parts + hit->part;
  if (request->compared_bits < 16)
    score += m->fine_codes ? hit->score * (.5f + (float)part->lengths[hit->item] / 200)
                           : multiply_hit_id(m, w, hit);
  return score - find_density_cost(request, part, hit->item, score / factor);
}

/* Replace the rounded scores of hits by exact ones, where they may be among the best k, and drop the
   other hits. ``limit`` is the least rounded score of such a hit. Return the number of hits left. */
static int64_t refine_scores(const CellScan *scan, Hit *hits, float *scores, const float *totals,
                             int64_t n, float limit) {
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++) {
    if (totals[i] < limit) continue;
    hits[left] = hits[i];
    scores[left++] = scores[i];
  }
  multiply_hits(scan, hits, left);
  return left;
}

/* Replace the hits of a query, which begin at ``first``, by the best of them by embeddings.
   Residuals are compared with ``query``, in the space of the codes, whole embeddings with
   ``compared``. */
static int rank_by_embeddings(const Model *m, const Request *request, const float *query,
                              const float *compared, float factor, int64_t first,
                              const CellScan *scan, Work *w) {
  int64_t n = w->num_hits - first, k = request->compared_k < n ? request->compared_k : n;
  if (!reserve(&w->keys, n, sizeof(uint64_t)) || !reserve(&w->chosen, k, sizeof(Hit)) ||
      !reserve(&w->scores, 2 * n, sizeof(float)))
    return NO_MEMORY;
  Hit *hits = (Hit *)w->hit_buffer.at + first, *chosen = w->chosen.at;
  float *scores = w->scores.at, *totals = scores + n;
  uint64_t *keys = w->keys.at;
  int is_residual = request->compared_bits < 16;
  score_embeddings(m, request, is_residual ? query : compared, factor, hits, n, scores, w);
  for (int is_exact = !scan || !is_residual;; is_exact = 1) {
    for (int64_t i = 0; i < n; i++) {
      totals[i] = complete_score(m, request, w, hits + i, scores[i], factor);
      keys[i] = make_key(totals[i], i);
    }
    sort_keys(keys, n, k);
    if (is_exact || !k) break;
    float limit = totals[(uint32_t)keys[k - 1]] - rounding_error(scan);
    n = refine_scores(scan, hits, scores, totals, n, limit);
  }
  for (int64_t i = 0; i < k; i++) {
    chosen[i] = hits[(uint32_t)keys[i]];
    chosen[i].score = totals[(uint32_t)keys[i]];
  }
  memcpy(hits, chosen, (size_t)k * sizeof(Hit));
  w->num_hits = first + k;
  return 1;
}
