/* Ranking of the IDs under the beams

     score = sum over levels of q · (code vector) - half_norm_step * byte_1
             - density_step * (byte_2 - ZERO_DENSITY)

   where byte_1 and byte_2 follow the codes of an ID. Codes that all IDs under a beam share are
   summed once, in its base. */

static int add_items(const Part *part, int64_t number, const Leaf *leaf, int64_t limit, Work *w) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[leaf->row], high = table->bucket_starts[leaf->row + 1];
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  for (int64_t position = low; position < high && w->num_hits < limit; position++) {
    int64_t item = table->items[position];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    if (part->allowed && !part->allowed[item]) continue;
    if (!reserve(&w->hit_buffer, w->num_hits + 1, sizeof(Hit))) return NO_MEMORY;
    ((Hit *)w->hit_buffer.at)[w->num_hits++] =
        (Hit){number, item, leaf->row, leaf->beam, leaf->score, 0};
  }
  return 1;
}

/* Count the allowed items of an ID that has some, or of the rows up to ``end`` if all are allowed.
 */
static int64_t count_items(const Part *part, int64_t row, int64_t end) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[row], high = table->bucket_starts[end], count = 0;
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  if (!part->allowed || high - low == 1) return high - low;
  for (int64_t position = low; position < high; position++) {
    int64_t item = table->items[position];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    count += part->allowed[item];
  }
  return count;
}

static inline __attribute__((always_inline)) float sum_codes(const float *tables,
                                                             const uint8_t *codes, const int n) {
  float sums[4] = {0};
  for (int l = 0; l < n; l++) sums[l & 3] += tables[l * CODES + codes[l]];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

static inline float find_costs(const Request *request, const uint8_t *costs) {
  return request->half_norm_step * costs[0] + request->density_step * (costs[1] - ZERO_DENSITY);
}

/* Compute the products of the query and the code vectors of the last levels, both rounded to 16
   bits. Vectors of few dimensions are not rounded: exact products take little time, and many items
   may have scores within a millionth. */
static void multiply_codes(const Model *m, Work *w, int64_t first_level, const float *query) {
  if (m->dim <= MAX_EXACT_DIMENSIONS) {
    const float *vectors = m->vectors;
    for (int64_t l = 0; l < m->levels; vectors += m->sizes[l++] * m->dim)
      if (l >= first_level)
        multiply_rows(vectors, m->sizes[l], m->dim, query, (float *)w->products.at + l * CODES);
    return;
  }
  int64_t dim = m->dim, groups = (dim + GROUP_DIMENSIONS - 1) / GROUP_DIMENSIONS, code = 0;
  float step = round_query(query, dim, 128, w->short_query.at);
  Packed packed = pack_query(w->short_query.at, dim, 8, w->packed_query.at);
  const uint8_t *bytes = m->bytes;
  for (int64_t l = 0; l < m->levels; l++)
    for (int64_t c = 0, size = m->sizes[l]; c < size;
         c += BLOCK, bytes += 2 * BLOCK * groups * GROUP_DIMENSIONS) {
      int64_t n = size - c < BLOCK ? size - c : BLOCK;
      float values[BLOCK], *products = (float *)w->products.at + l * CODES + c;
      if (l >= first_level) multiply_block(bytes, groups, &packed, values);
      for (int64_t j = 0; j < n; j++, code++)
        if (l >= first_level) products[j] = values[j] * (m->steps[code] * step);
    }
}

/* A scan of the IDs under the beams. */
typedef struct {
  const Request *request;
  float *tables;          /* products of the scanned levels; NULL: all IDs are kept, unranked */
  int64_t shared, levels; /* first codes, whose products are in the base of a beam; all codes */
  Limit best;
  Work *work;
  int64_t columns; /* columns of IDs that have bytes; 0: rows are not screened */
  /* a score minus the base of its beam is at most sum + step * (sum over columns of bytes) */
  float step, sum;
  uint8_t bytes[MAX_ID_COLUMNS][CODES];
  int64_t part, count; /* of the rows that wait until there is a block; they have the same base */
  float base;
  int32_t rows[BLOCK], beams[BLOCK];
} Scan;

/* Screening: most of the BLOCK IDs of a block are dropped together, since an upper bound of their
   scores is below the limit. */
#ifdef __AVX512VBMI__

/* Round the products of codes, and the costs of an ID's bytes, up to bytes:

     value <= largest + step * (byte - 254), byte in 1 .. 255

   so that sum + step * (sum of bytes) is an upper bound of a score. Values that are too low for a
   byte get 1. */
static void make_tables(Scan *scan, int64_t levels) {
  float spread = 0, largest[MAX_ID_COLUMNS];
  scan->columns = levels + 2;
  for (int64_t l = 0; l < levels; l++) {
    const float *values = scan->tables + l * CODES;
    float smallest = values[0];
    largest[l] = values[0];
    for (int c = 1; c < CODES; c++) {
      largest[l] = values[c] > largest[l] ? values[c] : largest[l];
      smallest = values[c] < smallest ? values[c] : smallest;
    }
    if (largest[l] - smallest > spread) spread = largest[l] - smallest;
  }
  scan->step = spread > 0 ? spread / 250 : 1;
  scan->sum = 0;
  float scale = 1 / scan->step;
  for (int64_t l = 0; l < levels; l++) {
    const float *values = scan->tables + l * CODES;
    for (int c = 0; c < CODES; c++) {
      float byte = 254 - (largest[l] - values[c]) * scale;
      scan->bytes[l][c] = (uint8_t)((byte > 0 ? byte : 0) + 1);
    }
    scan->sum += largest[l] - 254 * scan->step;
  }
  for (int64_t l = 0; l < 2; l++) {
    float cost = l ? scan->request->density_step : scan->request->half_norm_step;
    for (int c = 0; c < CODES; c++) {
      float byte = 254 - cost * (float)c * scale;
      scan->bytes[levels + l][c] = (uint8_t)((byte > 0 ? byte : 0) + 1);
    }
    scan->sum -= 254 * scan->step;
  }
  scan->sum += scan->request->density_step * ZERO_DENSITY;
}

/* Return the bits of the rows, of BLOCK rows, whose scores may be above a limit. Sums of bytes are
   compared with (limit - sum) / step - 1; the 1 is for rounding. */
static inline __attribute__((always_inline)) uint64_t screen_block(const Scan *scan,
                                                                   const uint8_t *ids,
                                                                   int64_t columns,
                                                                   const int32_t *rows, float limit,
                                                                   const int n) {
  __m512i even[MAX_ID_COLUMNS], odd[MAX_ID_COLUMNS];
  float quotient = (limit - scan->sum) / scan->step - 1;
  if (!(quotient > 0)) return ~0ull;
#define ID(r) _mm_loadu_si128((const __m128i *)(ids + rows[r] * columns))
  for (int r = 0; r < 16;
       r++) /* four rows in each register; exchanging bytes four times makes columns of them */
    even[r] = _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(ID(r)), ID(r + 16), 1),
                           ID(r + 32), 2),
        ID(r + 48), 3);
#undef ID
#define EXCHANGE(from, to)                                      \
  for (int r = 0; r < 8; r++) {                                 \
    to[2 * r] = _mm512_unpacklo_epi8(from[r], from[r + 8]);     \
    to[2 * r + 1] = _mm512_unpackhi_epi8(from[r], from[r + 8]); \
  }
  EXCHANGE(even, odd)
  EXCHANGE(odd, even)
  EXCHANGE(even, odd)
  EXCHANGE(odd, even)
#undef EXCHANGE
  __m512i low = _mm512_setzero_si512(), high = low, bytes = _mm512_set1_epi16(255);
  for (int c = 0; c < n; c++) {
    const uint8_t *table = scan->bytes[c];
    __m512i first = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), even[c],
                                             _mm512_loadu_si512(table + 64));
    __m512i last = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), even[c],
                                            _mm512_loadu_si512(table + 192));
    __m512i value = _mm512_mask_blend_epi8(_mm512_movepi8_mask(even[c]), first, last);
    low = _mm512_add_epi16(low, _mm512_and_si512(value, bytes));
    high = _mm512_add_epi16(high, _mm512_srli_epi16(value, 8));
  }
  __m512i least = _mm512_set1_epi16(quotient < 32767 ? (int16_t)quotient : 32767);
  return _pdep_u64(_mm512_cmpge_epi16_mask(low, least), 0x5555555555555555) |
         _pdep_u64(_mm512_cmpge_epi16_mask(high, least), 0xaaaaaaaaaaaaaaaa);
}
#else

static void make_tables(
    Scan *scan, int64_t levels) { /* the costs of an ID's bytes, after the products of its codes */
  float *costs = scan->tables + levels * CODES;
  scan->columns = levels + 2;
  for (int c = 0; c < CODES; c++) {
    costs[c] = -scan->request->half_norm_step * (float)c;
    costs[CODES + c] = -scan->request->density_step * (float)(c - ZERO_DENSITY);
  }
}

static inline __attribute__((always_inline)) uint64_t screen_block(const Scan *scan,
                                                                   const uint8_t *ids,
                                                                   int64_t columns,
                                                                   const int32_t *rows, float limit,
                                                                   const int n) {
  float scores[BLOCK];
  uint64_t good = 0;
  for (int r = 0; r < BLOCK; r++) {
    uint64_t halves[2];
    float sums[4] = {0};
    memcpy(halves, ids + rows[r] * columns, sizeof halves);
    for (int l = 0; l < n; l++)
      sums[l & 3] += scan->tables[l * CODES + (uint8_t)(halves[l >> 3] >> (l & 7) * 8)];
    scores[r] = sums[0] + sums[1] + (sums[2] + sums[3]);
  }
  for (int r = 0; r < BLOCK; r++) good |= (uint64_t)(scores[r] >= limit) << r;
  return good;
}
#endif

static inline __attribute__((always_inline)) int scan_id(Scan *scan, const Part *part, float base,
                                                         int64_t number, int64_t row, int64_t beam,
                                                         const int n) {
  const Table *table = part->table;
  const uint8_t *id = table->ids + row * table->columns;
  float score = 0;
  if (scan->tables) {
    score = base + sum_codes(scan->tables, id + scan->shared, n);
    if (table->columns > scan->levels) score -= find_costs(scan->request, id + scan->levels);
    if (score < scan->best.limit) return 1;
    if (score > scan->best.limit) {
      scan->best.scores[scan->best.count++] = score;
      if (scan->best.count == LIMIT_SLACK + 2 * scan->best.k) raise_limit(&scan->best);
    }
  }
  Work *w = scan->work;
  if (!reserve(&w->leaves, w->num_leaves + 1, sizeof(Leaf))) return NO_MEMORY;
  ((Leaf *)w->leaves.at)[w->num_leaves++] =
      (Leaf){(int32_t)number, (int32_t)row, (int32_t)beam, score};
  return 1;
}

/* Score the rows that wait, if screening does not drop them. */
static inline __attribute__((always_inline)) int scan_block(Scan *scan, const int n) {
  const Part *part = scan->work->parts + scan->part;
  int64_t count = scan->count;
  uint64_t good = count < BLOCK ? (1ull << count) - 1 : ~0ull;
  const Table *table = part->table;
  int32_t last = 0;
  for (int64_t i = 0; i < count; i++) last = scan->rows[i] > last ? scan->rows[i] : last;
  if (scan->columns == table->columns - scan->shared && count > MIN_SCREENED_ROWS &&
      (last + 1) * table->columns + MAX_ID_COLUMNS <=
          table->rows * table->columns) { /* nothing after the table is read */
    for (int64_t i = count; i < BLOCK; i++) scan->rows[i] = last;
    good &= screen_block(scan, table->ids + scan->shared, table->columns, scan->rows,
                         scan->best.limit - scan->base, n + 2);
  }
  scan->count = 0;
  for (; good; good &= good - 1) {
    int i = __builtin_ctzll(good);
    if (scan_id(scan, part, scan->base, scan->part, scan->rows[i], scan->beams[i], n) < 0)
      return NO_MEMORY;
  }
  return 1;
}

/* Scan the IDs of a part under a beam; up to BLOCK - 1 of them wait for further ones. Count items.
 */
static inline __attribute__((always_inline)) int scan_range(Scan *scan, int64_t number,
                                                            int64_t beam, float base, const int n) {
  Work *w = scan->work;
  const Part *part = w->parts + number;
  const int32_t *range = (int32_t *)w->ranges.at + (beam * w->num_parts + number) * 2;
  int64_t low = range[0], high = range[1];
  if (low >= high) return 1;
  if (scan->count && (scan->part != number || scan->base != base) && scan_block(scan, n) < 0)
    return NO_MEMORY;
  scan->part = number;
  scan->base = base;
  if (!part->words) {
    int64_t items = count_items(part, low, high);
    if (items < 0) return DAMAGED;
    w->num_ranked += items;
    while (low < high) {
      int64_t size = high - low < BLOCK - scan->count ? high - low : BLOCK - scan->count;
      for (int64_t i = 0; i < size; i++) {
        scan->rows[scan->count + i] = (int32_t)(low + i);
        scan->beams[scan->count + i] = (int32_t)beam;
      }
      scan->count += size;
      low += size;
      if (scan->count == BLOCK && scan_block(scan, n) < 0) return NO_MEMORY;
    }
    return 1;
  }
  for (int64_t first = low & -64; first < high; first += 64) {
    int64_t last = first + 64 < part->table->rows ? first + 64 : part->table->rows;
    uint64_t bits = part->words[first >> 6];
    if (first < low) bits &= ~0ull << (low - first);
    if (high < first + 64) bits &= ~0ull >> (first + 64 - high);
    if (part->table->bucket_starts[last] - part->table->bucket_starts[first] ==
        last - first) { /* an item for each ID */
      w->num_ranked += __builtin_popcountll(bits);
    } else {
      for (uint64_t remaining = bits; remaining; remaining &= remaining - 1) {
        int64_t row = first + __builtin_ctzll(remaining), items = count_items(part, row, row + 1);
        if (items < 0) return DAMAGED;
        w->num_ranked += items;
      }
    }
    for (; bits; bits &= bits - 1) {
      scan->rows[scan->count] = (int32_t)(first + __builtin_ctzll(bits));
      scan->beams[scan->count] = (int32_t)beam;
      if (++scan->count == BLOCK && scan_block(scan, n) < 0) return NO_MEMORY;
    }
  }
  return 1;
}

/* Scan the IDs under all beams. */
static inline __attribute__((always_inline)) int scan_beams(Scan *scan, const int n) {
  enum { AHEAD = 16, LINE = 64 };
  Work *w = scan->work;
  const float *products = w->products.at;
  const int32_t *ranges = w->ranges.at;
  for (int64_t b = 0; b < w->rows; b++) {
    const uint8_t *codes = (uint8_t *)w->codes.at + b * scan->levels;
    float base = 0;
    for (int64_t l = 0; l < scan->shared && scan->request->k; l++)
      base += products[l * CODES + codes[l]];
    for (int64_t p = 0; p < w->num_parts; p++) {
      if (b + AHEAD < w->rows) {
        const Table *table = w->parts[p].table;
        const int32_t *next = ranges + ((b + AHEAD) * w->num_parts + p) * 2;
        int64_t size = next[1] - next[0] < BLOCK ? next[1] - next[0] : BLOCK;
        __builtin_prefetch(table->bucket_starts + next[0]);
        __builtin_prefetch(table->bucket_starts + next[1]);
        for (int64_t byte = 0; byte < size * table->columns; byte += LINE)
          __builtin_prefetch(table->ids + next[0] * table->columns + byte);
      }
      int status = scan_range(scan, p, b, base, n);
      if (status < 0) return status;
    }
  }
  return scan->count ? scan_block(scan, n) : 1;
}

/* Rank the items under the beams by codes. */
static int rank_by_codes(const Model *m, const Request *request, int64_t decoded,
                         const float *query, Work *w) {
  int64_t levels = m->levels, shared = decoded ? decoded : 1, ranges = w->rows * w->num_parts;
  w->num_leaves = 0;
  if (!reserve(&w->best, LIMIT_SLACK + 2 * request->k, sizeof(float))) return NO_MEMORY;
  Scan scan = {request, NULL, shared, levels, {w->best.at, request->k, 0, -INFINITY},
               w,       0,    0,      0,      {{0}},
               0,       0,    0,      {0},    {0}};
  if (request->k || (request->compared_k && request->compared_bits < 16))
    multiply_codes(m, w, decoded, query);
  if (request->k) {
    if (w->below < BLOCK * ranges)
      scan.shared = 1; /* so that a block has the IDs under several beams */
    scan.tables = (float *)w->products.at + scan.shared * CODES;
    if (levels - scan.shared + 2 <= MAX_ID_COLUMNS &&
        (scan.shared < shared || w->below > MIN_SCREENED_ROWS * ranges))
      make_tables(&scan, levels - scan.shared);
  }
  int status;
  switch (levels - scan.shared) { /* the compiler unrolls the sums for these numbers of levels */
#define CASE(n) \
  case n: status = scan_beams(&scan, n); break;
    CASE(4)
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        default : status = scan_beams(&scan, (int)(levels - scan.shared));
  }
  if (status < 0) return status;
  raise_limit(&scan.best);
  const Leaf *leaves = w->leaves.at;
  int64_t n = 0, limit_of_hits = request->k ? w->num_hits + request->k : INT64_MAX;
  if (!reserve(&w->keys, w->num_leaves, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_leaves; i++)
    if (!(leaves[i].score < scan.best.limit)) keys[n++] = make_key(leaves[i].score, i);
  if (request->k) sort_keys(keys, n, request->k);
  for (int64_t i = 0; i < n && w->num_hits < limit_of_hits; i++) {
    const Leaf *leaf = leaves + (uint32_t)keys[i];
    status = add_items(w->parts + leaf->part, leaf->part, leaf, limit_of_hits, w);
    if (status < 0) return status;
  }
  return 1;
}
