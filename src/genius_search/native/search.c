/* Search of ID tables: a scan of cells, or a beam search by code vectors or by a generator; then
   ranking by codes or by embeddings.

   The plain search in search/cells.py, search/beam.py and search/rank.py defines the results; tests
   compare the two. Nothing that is read from a table is trusted: rows out of range end the search
   with DAMAGED. native/build.py compiles this file, which includes the others, in variants for
   different processors.

   structures.h   what search/kernel.py and nn/packed.py fill, and the memory of a search
   products.c     products of queries with matrices, code vectors and packed integers
   sorting.c      the best of many scores
   generator.c    the decoder's probability of each code
   beam.c         the prefixes of IDs that a query follows
   ids.c          the IDs under these prefixes, ranked by codes
   cells.c        or instead of prefixes: cells, and the fine codes of their items
   embeddings.c   the best of these items, ranked by embeddings
   codes.c        codes of items, and sums for k-means */

#include "structures.h"

#include "products.c"
#include "sorting.c"
#include "generator.c"
#include "beam.c"
#include "ids.c"
#include "cells.c"
#include "embeddings.c"
#include "codes.c"

API int is_supported(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 1;
#endif
}

API Work *make_work(void) { return calloc(1, sizeof(Work)); }

/* Return whether the tables and embeddings of a request have the model's levels and dimensions.
   Other lengths and numbers were checked when the index was opened; rows and codes are checked
   again. */
static int matches_model(const Model *m, const Request *request, const Part *parts,
                         int64_t num_parts) {
  for (const Part *part = parts; part < parts + num_parts; part++) {
    int64_t costs = part->table->columns - m->levels;
    if (costs != 0 && costs != 2) return 0;
    int64_t bytes = (m->dim * request->compared_bits + 7) / 8 * part->table->num_items;
    if (request->compared_k && part->embedding_bytes != bytes) return 0;
    if (!m->fine_codes) continue;
    if (costs || !part->fine || !part->cell_starts) return 0;
    if (request->compared_k && request->compared_bits < 16 && !part->lengths) return 0;
  }
  return 1;
}

/* Search for queries[n][dim]; embeddings are compared with ``compared`` [n][dim]. The hits are in
   ``w`` until its next search. */
API int search(const Model *m, const Part *parts, int64_t num_parts, const Request *requests,
               const float *queries, const float *compared, int64_t n, Work *w) {
  int64_t levels = m->levels;
  w->num_parts = num_parts;
  w->num_hits = 0;
  if (!reserve(&w->products, (levels + 4) * CODES, sizeof(float)) ||
      !reserve(&w->scaled, m->dim, sizeof(float)) || !reserve(&w->weighed, m->dim, sizeof(float)) ||
      !reserve(&w->short_query, m->dim + 16, sizeof(int16_t)) ||
      !reserve(&w->packed_query, m->dim + 8 * BLOCK, 2 * sizeof(int16_t)) ||
      !reserve(&w->result_buffer, n, sizeof(Result)))
    return NO_MEMORY;
  memset(w->products.at, 0, (size_t)(levels + 2) * CODES * sizeof(float));
  Result *results = w->result_buffer.at;
  for (int64_t q = 0; q < n; q++, queries += m->dim) {
    int64_t before = w->num_hits;
    w->num_ranked = 0;
    w->parts = parts + requests[q].first_part;
    if (!matches_model(m, requests + q, w->parts, num_parts)) return DAMAGED;
    float factor;
    int64_t decoded = 0;
    int status;
    const float *query = w->scaled.at;
    CellScan scan;
    if (m->fine_codes) {
      scan = (CellScan){.model = m, .request = requests + q, .work = w, .limit = NO_LIMIT};
      multiply_levels(m, w, queries);
      factor = standardize_products(m, requests + q, queries, w);
      status = rank_by_cells(&scan);
    } else {
      factor = standardize_query(m, requests + q, queries, w);
      decoded = find_beams(m, requests + q, query, w);
      if (decoded < 0) return (int)decoded;
      status = rank_by_codes(m, requests + q, decoded, query, w);
    }
    if (status > 0 && requests[q].compared_k)
      status = rank_by_embeddings(m, requests + q, query, compared + q * m->dim, factor, before,
                                  m->fine_codes ? &scan : NULL, w);
    else if (status > 0 && m->fine_codes)
      status = rank_hits(w, before, requests[q].k);
    if (status < 0) return status;
    if (m->fine_codes) finish_hits(w, before);
    for (int64_t i = before; i < w->num_hits; i++) ((Hit *)w->hit_buffer.at)[i].score /= factor;
    if (!reserve(&w->decoded_buffer, w->num_hits * levels, sizeof(float))) return NO_MEMORY;
    for (int64_t i = before; i < w->num_hits; i++) {
      float *log_probabilities = (float *)w->decoded_buffer.at + i * levels;
      for (int64_t l = 0; l < levels; l++) log_probabilities[l] = NAN;
      if (decoded)
        memcpy(log_probabilities,
               (float *)w->gained.at + ((Hit *)w->hit_buffer.at)[i].beam * levels,
               (size_t)decoded * sizeof(float));
    }
    results[q] = (Result){w->num_hits - before, w->num_ranked};
  }
  w->hits = w->hit_buffer.at;
  w->decoded = w->decoded_buffer.at;
  w->results = results;
  return 1;
}
