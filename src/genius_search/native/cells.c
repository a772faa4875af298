/* Search of cells: the items of an ID with one or two semantic codes are a cell, and fine codes of
   4 bits follow the ID (nn/fine.py). The plain search in search/cells.py defines the results.

     score of an item = (product of the query with the vectors of its ID and fine codes)
                        - (weighted half norm of that vector)
                      = base of its cell + sum over its fine codes of tables[code]

   A query goes through these parts:

     multiply_levels()   products with all code vectors of cells, as integers
     fill_tables()       products with the vectors of fine codes, and their bytes
     choose_limits()     from a sample of cells: how good a cell must be
     list_cells()        the cells with good bases
     scan_cells()        the items in them; the best wait in ``w->kept``
     keep_shortlist()    the best of these, which are compared by embeddings next
     multiply_hits()     exact products of those that may be among the best k
     finish_hits()       rows of their IDs

   Cells are scanned twice: first the best ones, whose items show how good a score of the shortlist
   is; then those from which an item may reach it. */

enum { FINE_ROWS = 16 };      /* items in a block of fine codes */
enum { FINE_VALUES = 16 };    /* values of a fine code */
enum { MAX_FINE_CODES = 64 };
enum { LARGEST_BYTE = 31 };   /* eight such bytes have a sum that fits into a byte */
enum { UNIT_RANGE = 15000 };  /* bases of cells are integers of 16 bits in this range */
enum { NO_LIMIT = -32768 };   /* below every score */
enum { LARGEST_BASE = UNIT_RANGE + 8 }; /* rounding included */
enum { LIMIT_BUCKET = 16 };   /* resolution of limits from the sample of cells */
enum { MIN_SHORTLIST = 400 }; /* items whose scores are computed for a ranking by codes */
enum { CELL_LANES = 16 };     /* numbers of 16 bits that are compared together */

typedef struct {
  int32_t part, position, cell;
} Kept;

typedef struct {
  const Model *model;
  const Request *request;
  Work *work;
  float tables[MAX_FINE_CODES][FINE_VALUES]; /* products, and costs of half norms */
  /* The tables as bytes: those of codes 0, 2, 4 ..., then those of codes 1, 3, 5 ... */
  uint8_t bytes[2][MAX_FINE_CODES / 2][FINE_VALUES] __attribute__((aligned(64)));
  float step;                 /* of the bytes */
  float deviation;            /* of the sums over fine codes */
  float mean;                 /* of these sums, above ``smallest`` */
  float unit;                 /* bases of cells are multiplied by this and rounded */
  int16_t first[CODES] __attribute__((aligned(64)));  /* bases of codes, in this unit */
  int16_t second[CODES] __attribute__((aligned(64)));
  int32_t best_second;        /* the best of these */
  int16_t cost_factor;        /* of the costs of cells */
  int32_t best;               /* the best base of a cell */
  float smallest;             /* sum of the smallest numbers of tables */
  float origin;               /* score of an item in the best cell whose bytes are 0 */
  int64_t num_kept, next_limit, shortlist;
  int32_t limit;              /* sums of kept items are above */
} CellScan;

static inline int64_t num_cells(const Model *m) { return m->grid[1] * m->grid[2]; }

/* Multiply the query, rounded to 16 bits, by the code vectors of all levels, in 8 bits. */
static void multiply_levels(const Model *m, Work *w, const float *query) {
  int64_t dim = m->cell_dim, count = m->grid[0] + m->grid[1] + m->grid[2];
  int16_t *rounded = w->short_query.at;
  float step = round_query(query, m->dim, 128, rounded), *products = w->products.at;
  memset(rounded + m->dim, 0, (size_t)(dim - m->dim) * sizeof(int16_t));
  for (int64_t c = 0; c < count; c += 4) {
    const int8_t *vectors = m->cell_vectors + c * dim;
    int32_t sums[4];
#ifdef __AVX2__
    __m256i totals[4] = {0};
    for (int64_t i = 0; i < dim; i += 16) {
      __m256i numbers = _mm256_loadu_si256((const __m256i *)(rounded + i));
      for (int j = 0; j < 4; j++) {
        __m256i wide =
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(vectors + j * dim + i)));
        totals[j] = _mm256_add_epi32(totals[j], _mm256_madd_epi16(numbers, wide));
      }
    }
    __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(totals[0], totals[1]),
                                      _mm256_hadd_epi32(totals[2], totals[3]));
    _mm_storeu_si128((__m128i *)sums, _mm_add_epi32(_mm256_castsi256_si128(pairs),
                                                    _mm256_extracti128_si256(pairs, 1)));
#else
    for (int j = 0; j < 4; j++) {
      uint32_t sum = 0;
      for (int64_t i = 0; i < dim; i++) sum += (uint32_t)(rounded[i] * vectors[j * dim + i]);
      sums[j] = (int32_t)sum;
    }
#endif
    for (int j = 0; j < 4; j++) products[c + j] = (float)sums[j] * (m->cell_steps[c + j] * step);
  }
}

/* Scale the query and the products that multiply_levels() left. */
static float standardize_products(const Model *m, const Request *request, const float *query,
                                  Work *w) {
  float *products = w->products.at, *first = products + m->grid[0];
  float factor = scale_query(request, query, m->dim, first, m->grid[1], w->scaled.at);
  for (int64_t c = 0; c < m->grid[0]; c++) products[c] *= factor;
  for (int64_t c = 0; c < m->grid[2]; c++) first[m->grid[1] + c] *= factor;
  return factor;
}

/* Fill the tables of the fine codes of a query, and round them to bytes. */
static void fill_tables(CellScan *scan, const float *query) {
  const Model *m = scan->model;
  float widest = 0, variance = 0, smallest[MAX_FINE_CODES];
  int64_t last = m->fine_codes - 1;
  scan->mean = scan->smallest = 0;
  for (int64_t t = 0, d = 0; t < m->fine_codes; t++) {
    float table[FINE_VALUES] = {0}, low, high, sum = 0, squares = 0;
    for (; t < last && d < m->fine_ends[t]; d++)
      for (int v = 0; v < FINE_VALUES; v++) table[v] += query[d] * m->fine_vectors[d * 16 + v];
    for (int v = 0; t == last && v < FINE_VALUES; v++) table[v] = -m->fine_norms[v];
    low = high = table[0];
    for (int v = 0; v < FINE_VALUES; v++) {
      low = table[v] < low ? table[v] : low;
      high = table[v] > high ? table[v] : high;
      sum += table[v];
      squares += table[v] * table[v];
    }
    smallest[t] = low;
    scan->smallest += low;
    scan->mean += sum / FINE_VALUES - low;
    variance += squares / FINE_VALUES - (sum / FINE_VALUES) * (sum / FINE_VALUES);
    widest = high - low > widest ? high - low : widest;
    memcpy(scan->tables[t], table, sizeof table);
  }
  scan->deviation = variance > 0 ? sqrtf(variance) : 0;
  /* A step is at least a unit of the bases, so that differences of bases fit into 16 bits. */
  scan->step = widest / LARGEST_BYTE > 1 / scan->unit ? widest / LARGEST_BYTE : 1 / scan->unit;
  float steps = 1 / scan->step;
  for (int64_t t = 0; t < m->fine_codes; t++) {
    uint8_t *bytes = scan->bytes[t & 1][t / 2];
    for (int v = 0; v < FINE_VALUES; v++)
      bytes[v] = (uint8_t)(int32_t)((scan->tables[t][v] - smallest[t]) * steps + .5f);
  }
}

/* Round the products of codes, so that sums of three, and costs of cells, fit into 16 bits. */
static void round_bases(CellScan *scan) {
  const Model *m = scan->model;
  const float *products = scan->work->products.at;
  float largest[3] = {0};
  for (int64_t l = 0, c = 0; l < 3; l++)
    for (int64_t i = 0; i < m->grid[l]; i++, c++)
      largest[l] = fabsf(products[c]) > largest[l] ? fabsf(products[c]) : largest[l];
  float range = largest[0] + largest[1] + largest[2] + m->largest_cell_cost;
  scan->unit = range > 0 ? UNIT_RANGE / range : 1;
  scan->cost_factor = (int16_t)lrintf(m->largest_cell_cost * scan->unit);
  const float *second = products + m->grid[0] + m->grid[1];
  scan->best_second = NO_LIMIT;
  for (int64_t c = 0; c < CODES; c++) {
    scan->second[c] = (int16_t)(c < m->grid[2] ? lrintf(second[c] * scan->unit) : 0);
    if (c < m->grid[2] && scan->second[c] > scan->best_second) scan->best_second = scan->second[c];
  }
}

/* Set the bases of first codes for a modality's code. */
static void add_modality(CellScan *scan, int64_t modality) {
  const Model *m = scan->model;
  const float *products = scan->work->products.at, *first = products + m->grid[0];
  for (int64_t c = 0; c < m->grid[1]; c++)
    scan->first[c] = (int16_t)lrintf((products[modality] + first[c]) * scan->unit);
}

/* Return a cost in the unit of bases: cost * factor / 2^15, rounded as _mm256_mulhrs_epi16 does. */
static inline int32_t scale_cost(int16_t cost, int16_t factor) {
  return (((int32_t)cost * factor >> 14) + 1) >> 1;
}

/* List those cells of a modality, out of the occupied ones, whose bases are in a range. */
static int64_t list_occupied(CellScan *scan, int64_t modality, int32_t low, int32_t high,
                             int64_t n) {
  const Model *m = scan->model;
  const Part *part = scan->work->parts;
  int32_t *cells = scan->work->cells.at, second_codes = (int32_t)m->grid[2];
  int16_t *bases = scan->work->bases.at;
  int32_t origin = (int32_t)(modality * num_cells(m)), end = origin + (int32_t)num_cells(m);
  int64_t i = first_at_least(part->occupied, part->num_occupied, origin);
  for (; i < part->num_occupied && part->occupied[i] < end; i++) {
    int32_t cell = part->occupied[i], first = (cell - origin) / second_codes;
    int32_t base = scan->first[first] + scan->second[cell - origin - first * second_codes] -
                   scale_cost(m->cell_costs[cell], scan->cost_factor);
    cells[n] = cell;
    bases[n] = (int16_t)base;
    n += base > low && base <= high;
  }
  return n;
}

/* List the cells of a modality with bases above ``low`` and up to ``high``. */
static int list_cells(CellScan *scan, int64_t modality, int32_t low, int32_t high, int64_t *count) {
  const Model *m = scan->model;
  Work *w = scan->work;
  int64_t n = *count, second_codes = m->grid[2];
  int32_t origin = (int32_t)(modality * num_cells(m));
  if (!reserve(&w->cells, n + num_cells(m), sizeof(int32_t)) ||
      !reserve(&w->bases, n + num_cells(m), sizeof(int16_t)))
    return 0;
  if (w->parts->occupied) {
    *count = list_occupied(scan, modality, low, high, n);
    return 1;
  }
  int32_t *cells = w->cells.at;
  int16_t *bases = w->bases.at;
  const int16_t *costs = m->cell_costs + origin, *least = m->least_costs + modality * m->grid[1];
  for (int64_t a = 0; a < m->grid[1]; a++) {
    int64_t b = 0;
    if (scan->first[a] + scan->best_second - scale_cost(least[a], scan->cost_factor) <= low)
      continue; /* no cell with this first code is good enough */
#ifdef __AVX2__
    __m256i first = _mm256_set1_epi16(scan->first[a]);
    __m256i factor = _mm256_set1_epi16(scan->cost_factor);
    __m256i lowest = _mm256_set1_epi16((int16_t)low), most = _mm256_set1_epi16((int16_t)high);
    for (; b + CELL_LANES <= second_codes; b += CELL_LANES) {
      __m256i cost = _mm256_mulhrs_epi16(
          _mm256_loadu_si256((const __m256i *)(costs + a * second_codes + b)), factor);
      __m256i base = _mm256_sub_epi16(
          _mm256_add_epi16(first, _mm256_load_si256((const __m256i *)(scan->second + b))), cost);
      __m256i good =
          _mm256_andnot_si256(_mm256_cmpgt_epi16(base, most), _mm256_cmpgt_epi16(base, lowest));
      uint32_t bits = (uint32_t)_mm256_movemask_epi8(good) & 0x55555555;
      if (!bits) continue;
      int16_t values[CELL_LANES];
      _mm256_storeu_si256((__m256i *)values, base);
      for (; bits; bits &= bits - 1) {
        int j = __builtin_ctz(bits) >> 1;
        cells[n] = origin + (int32_t)(a * second_codes + b + j);
        bases[n++] = values[j];
      }
    }
#endif
    for (; b < second_codes; b++) {
      int32_t cost = scale_cost(costs[a * second_codes + b], scan->cost_factor);
      int32_t base = scan->first[a] + scan->second[b] - cost;
      cells[n] = origin + (int32_t)(a * second_codes + b);
      bases[n] = (int16_t)base;
      n += base > low && base <= high;
    }
  }
  *count = n;
  return 1;
}

/* Return the largest number that at least ``most`` of the scores exceed, or ``low`` if fewer than
   ``most`` exceed that. The memory of scores has room for 15 more. */
static int32_t find_limit(int16_t *scores, int64_t count, int64_t most, int32_t low) {
  int32_t high = NO_LIMIT;
  for (int64_t i = count; i & (CELL_LANES - 1); i++) scores[i] = NO_LIMIT;
  for (int64_t i = 0; i < count; i++) high = scores[i] > high ? scores[i] : high;
  int32_t floor_of_limits = low;
  for (int is_first = 1; is_first || high - low > 1; is_first = 0) {
    /* At least ``most`` exceed low, once that has been found; fewer exceed high. */
    int32_t middle = is_first ? low : (low + high) >> 1;
    int64_t above = 0;
    for (int64_t i = 0; i < count;) {
      int64_t end = i + 30000 < count ? i + 30000 : count;
      int16_t part = 0, than = (int16_t)middle;
      for (; i < end; i++) part = (int16_t)(part + (scores[i] > than));
      above += part;
    }
    if (above >= most)
      low = middle;
    else if (is_first)
      return floor_of_limits;
    else
      high = middle;
  }
  return low;
}

/* Return the position of an item's sum among those of its block. */
static inline int sum_of(int row) { return (row & 1) * (FINE_ROWS / 2) + row / 2; }

/* Sum the bytes of the codes of a block's items: first those of even, then those of odd items.

   A block has 16 bytes for each pair of codes. A register holds those of two pairs, and their
   tables: sixteen codes, eight in each half, have sums that fit into its bytes. */
static inline __attribute__((always_inline)) void sum_block(const CellScan *scan,
                                                            const uint8_t *block, int16_t *sums,
                                                            const int codes) {
#ifdef __AVX2__
  __m256i low = _mm256_set1_epi8(15), lower = _mm256_set1_epi16(255), even = {0}, odd = {0};
  for (int p = 0; p < codes / 2;) {
    __m256i totals = {0};
    for (int end = p + 8; p < end && p < codes / 2; p += 2) {
      __m256i pairs = _mm256_loadu_si256((const __m256i *)(block + p * FINE_ROWS));
      __m256i first = _mm256_load_si256((const __m256i *)scan->bytes[0][p]);
      __m256i second = _mm256_load_si256((const __m256i *)scan->bytes[1][p]);
      __m256i a = _mm256_shuffle_epi8(first, _mm256_and_si256(pairs, low));
      __m256i b =
          _mm256_shuffle_epi8(second, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low));
      totals = _mm256_add_epi8(totals, _mm256_add_epi8(a, b));
    }
    even = _mm256_add_epi16(even, _mm256_and_si256(totals, lower));
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(totals, 8));
  }
  __m256i first_halves = _mm256_permute2x128_si256(even, odd, 0x20);
  __m256i second_halves = _mm256_permute2x128_si256(even, odd, 0x31);
  _mm256_store_si256((__m256i *)sums, _mm256_add_epi16(first_halves, second_halves));
#else
  memset(sums, 0, FINE_ROWS * sizeof(int16_t));
  for (int p = 0; p < codes / 2; p++)
    for (int r = 0; r < FINE_ROWS; r++) {
      uint8_t pair = block[p * FINE_ROWS + r];
      int sum = scan->bytes[0][p][pair & 15] + scan->bytes[1][p][pair >> 4];
      sums[sum_of(r)] = (int16_t)(sums[sum_of(r)] + sum);
    }
#endif
}

/* Return the bits of a block's items whose sums are above a limit. */
static inline uint32_t find_above(const int16_t *sums, int16_t limit) {
#ifdef __AVX2__
  __m256i all = _mm256_load_si256((const __m256i *)sums);
  __m256i good = _mm256_cmpgt_epi16(all, _mm256_set1_epi16(limit));
  __m128i even = _mm256_castsi256_si128(good), odd = _mm256_extracti128_si256(good, 1);
  return (uint32_t)_mm_movemask_epi8(_mm_blendv_epi8(odd, even, _mm_set1_epi16(255)));
#else
  uint32_t bits = 0;
  for (int r = 0; r < FINE_ROWS; r++) bits |= (uint32_t)(sums[sum_of(r)] > limit) << r;
  return bits;
#endif
}

/* Keep items of a block, given as bits, and raise the limit if there are many more than needed. */
static int keep_items(CellScan *scan, int64_t part, int32_t block, int32_t cell, uint32_t items,
                      const int16_t *sums, int32_t base) {
  Work *w = scan->work;
  if (!reserve(&w->kept, scan->num_kept + FINE_ROWS, sizeof(Kept)) ||
      !reserve(&w->sums, scan->num_kept + FINE_ROWS + CELL_LANES, sizeof(int16_t)))
    return 0;
  Kept *kept = w->kept.at;
  int16_t *kept_sums = w->sums.at;
  for (; items; items &= items - 1) {
    int row = __builtin_ctz(items);
    kept[scan->num_kept] = (Kept){(int32_t)part, block * FINE_ROWS + row, cell};
    kept_sums[scan->num_kept++] = (int16_t)(sums[sum_of(row)] + base);
  }
  if (scan->num_kept >= scan->next_limit) {
    scan->limit = find_limit(kept_sums, scan->num_kept, scan->shortlist, scan->limit);
    scan->next_limit = scan->num_kept + scan->shortlist;
  }
  return 1;
}

/* Scan the items of a part in the listed cells. Those above the limit are kept; it rises while more
   are kept than the shortlist has room for. */
static inline __attribute__((always_inline)) int scan_part(CellScan *scan, int64_t number,
                                                           int64_t count, const int codes) {
  enum { AHEAD = 12, BLOCKS_AHEAD = 6, FETCHED_BLOCKS = 4, LINE = 64 };
  const int block_bytes = codes * FINE_ROWS / 2;
  Work *w = scan->work;
  const Part *part = w->parts + number;
  const int32_t *cells = w->cells.at, *starts = part->cell_starts;
  const int16_t *bases = w->bases.at;
  const uint16_t *allowed = (const uint16_t *)part->positions;
  float steps = 1 / (scan->unit * scan->step); /* steps of the bytes in a unit of bases */
  int16_t sums[FINE_ROWS] __attribute__((aligned(32)));
  int32_t summed = -1; /* the block with these sums: cells that follow each other share blocks */
  for (int64_t c = 0; c < count; c++) {
    if (c + AHEAD < count) {
      __builtin_prefetch(starts + cells[c + AHEAD]);
      int32_t cell = cells[c + BLOCKS_AHEAD], block = starts[cell] / FINE_ROWS;
      int32_t end = (starts[cell + 1] - 1) / FINE_ROWS;
      if (end >= block + FETCHED_BLOCKS) end = block + FETCHED_BLOCKS - 1;
      for (; block <= end; block++) {
        if (allowed && !allowed[block]) continue;
        const uint8_t *next = part->fine + (int64_t)block * block_bytes;
        for (int byte = 0; byte < block_bytes; byte += LINE) __builtin_prefetch(next + byte);
      }
    }
    int32_t low = starts[cells[c]], high = starts[cells[c] + 1];
    if (low == high) continue;
    int32_t base = (int32_t)lrintf((float)(bases[c] - scan->best) * steps);
    for (int32_t block = low / FINE_ROWS; block <= (high - 1) / FINE_ROWS; block++) {
      int32_t from = low - block * FINE_ROWS, to = high - block * FINE_ROWS;
      uint32_t mask = to >= FINE_ROWS ? 0xffff : (1u << to) - 1;
      if (from > 0) mask &= 0xffffu << from;
      if (allowed) mask &= allowed[block];
      if (!mask) continue;
      w->num_ranked += __builtin_popcount(mask);
      if (block != summed) sum_block(scan, part->fine + (int64_t)block * block_bytes, sums, codes);
      summed = block;
      uint32_t good = find_above(sums, (int16_t)(scan->limit - base)) & mask;
      if (good && !keep_items(scan, number, block, cells[c], good, sums, base)) return NO_MEMORY;
    }
  }
  return 1;
}

static int scan_cells(CellScan *scan, int64_t count) {
  for (int64_t number = 0; number < scan->work->num_parts; number++) {
    int status;
    switch (scan->model->fine_codes) {
#define CASE(codes) \
  case codes: status = scan_part(scan, number, count, codes); break;
      CASE(8) CASE(16) CASE(24) CASE(32) CASE(40) CASE(48) CASE(56) CASE(64)
#undef CASE
      default: return DAMAGED;
    }
    if (status < 0) return status;
  }
  return 1;
}

/* Return whether a query may find items with this code of a modality. */
static int is_searched(const CellScan *scan, int64_t modality) {
  const Model *m = scan->model;
  const Work *w = scan->work;
  if (m->first_level && !(scan->request->level0[modality >> 3] >> (modality & 7) & 1)) return 0;
  for (int64_t p = 0; p < w->num_parts; p++) {
    const int32_t *starts = w->parts[p].cell_starts + modality * num_cells(m);
    if (starts[0] < starts[num_cells(m)]) return 1;
  }
  return 0;
}

/* Count the allowed items of the sampled cells by the bases of their cells: counts[b] is about
   bases that are b * LIMIT_BUCKET below the largest possible one. Return the number of all allowed
   items. */
static int64_t count_sampled(CellScan *scan, int64_t *counts) {
  const Model *m = scan->model;
  const Work *w = scan->work;
  int64_t total = 0;
  for (int64_t modality = 0; modality < m->grid[0]; modality++) {
    if (!is_searched(scan, modality)) continue;
    add_modality(scan, modality);
    const int16_t *costs = m->cell_costs + modality * num_cells(m);
    for (int64_t s = 0; s < m->num_sampled; s++) {
      int32_t first = m->sampled_cells[2 * s], second = m->sampled_cells[2 * s + 1];
      int16_t cost = costs[first * m->grid[2] + second];
      int32_t base = scan->first[first] + scan->second[second];
      base -= scale_cost(cost, scan->cost_factor);
      int32_t bucket = (LARGEST_BASE - base) / LIMIT_BUCKET; /* never negative */
      for (int64_t p = 0; p < w->num_parts; p++)
        counts[bucket] += w->parts[p].sampled_counts[modality * m->num_sampled + s];
    }
    for (int64_t p = 0; p < w->num_parts; p++) total += w->parts[p].allowed_counts[modality];
  }
  return total;
}

/* Return the number of items that are scanned first: those of a pool, and fewer if few are allowed,
   since the nearest of them are in a larger share of all cells. */
static int64_t num_first_rows(const CellScan *scan, int64_t total) {
  const Model *m = scan->model;
  const Request *request = scan->request;
  int64_t all = 1;
  for (int64_t p = 0; p < scan->work->num_parts; p++)
    all += scan->work->parts[p].cell_starts[m->grid[0] * num_cells(m)];
  int64_t first = (int64_t)(sqrt((double)total / (double)all) * (double)request->first_rows);
  return first > 2 * scan->shortlist ? first : 2 * scan->shortlist;
}

/* Find the limits of cells' bases above which there are about as many allowed items as are scanned
   first, and at most, from a sample of the cells. */
static void choose_limits(CellScan *scan, int32_t *first_limit, int32_t *last_limit) {
  int64_t counts[2 * LARGEST_BASE / LIMIT_BUCKET + 1] = {0}, sampled = 0, sum = 0;
  int64_t total = count_sampled(scan, counts), first = num_first_rows(scan, total);
  int64_t most = scan->request->candidates > first ? scan->request->candidates : first;
  *first_limit = *last_limit = NO_LIMIT;
  for (int b = 0; b <= 2 * LARGEST_BASE / LIMIT_BUCKET; b++) sampled += counts[b];
  if (!sampled || total <= first) return;
  double share = (double)sampled / (double)total;
  int64_t first_sum = (int64_t)((double)first * share), most_sum = (int64_t)((double)most * share);
  if (most >= total) most_sum = INT64_MAX;
  for (int32_t limit = LARGEST_BASE, b = 0; b <= 2 * LARGEST_BASE / LIMIT_BUCKET; b++) {
    sum += counts[b];
    limit -= LIMIT_BUCKET;
    if (*first_limit == NO_LIMIT && sum > first_sum) *first_limit = limit;
    if (sum > most_sum) {
      *last_limit = limit;
      return;
    }
  }
}

/* List the cells of all modalities that the query may find, and update the best base. */
static int list_modalities(CellScan *scan, int32_t low, int32_t high, int64_t *count) {
  *count = 0;
  for (int64_t modality = 0; modality < scan->model->grid[0]; modality++) {
    if (!is_searched(scan, modality)) continue;
    add_modality(scan, modality);
    if (!list_cells(scan, modality, low, high, count)) return NO_MEMORY;
  }
  return 1;
}

/* Return the packed codes of an item; two codes follow after each FINE_ROWS bytes. */
static inline const uint8_t *find_pairs(const CellScan *scan, const Hit *hit, int64_t codes) {
  return scan->work->parts[hit->part].fine + hit->row / FINE_ROWS * codes * FINE_ROWS / 2 +
         hit->row % FINE_ROWS;
}

/* Return the product of the query with the vectors of an item's codes, without rounding. */
static inline __attribute__((always_inline)) float multiply_codes_of(const CellScan *scan,
                                                                     const Hit *hit,
                                                                     const int codes) {
  const Model *m = scan->model;
  const float *products = scan->work->products.at, *tables = scan->tables[0];
  const uint8_t *pairs = find_pairs(scan, hit, codes);
  float sums[4] = {0};
  for (int p = 0; p < codes / 2; p++) {
    uint8_t pair = pairs[p * FINE_ROWS];
    sums[2 * (p & 1)] += tables[p * 2 * FINE_VALUES + (pair & 15)];
    sums[2 * (p & 1) + 1] += tables[p * 2 * FINE_VALUES + FINE_VALUES + (pair >> 4)];
  }
  int32_t cells = (int32_t)num_cells(m), modality = (int32_t)hit->beam / cells;
  int32_t cell = (int32_t)hit->beam - modality * cells, seconds = (int32_t)m->grid[2];
  int32_t first = cell / seconds;
  float base = products[modality] + products[m->grid[0] + first];
  if (seconds > 1) base += products[m->grid[0] + m->grid[1] + cell - first * seconds];
  /* The last code is that of the half norm. */
  float half_norm = m->fine_norms[pairs[(codes / 2 - 1) * FINE_ROWS] >> 4];
  return base + (sums[0] + sums[1] + (sums[2] + sums[3])) + half_norm;
}

/* Return the half norms of an item's cell and fine codes. */
static inline float find_half_norm(const CellScan *scan, const Hit *hit) {
  const Model *m = scan->model;
  const uint8_t *pairs = find_pairs(scan, hit, m->fine_codes);
  return m->largest_cell_cost * (float)m->cell_costs[hit->beam] / 32767 +
         m->fine_norms[pairs[(m->fine_codes / 2 - 1) * FINE_ROWS] >> 4];
}

/* Return what an item's score loses in a ranking by codes: its half norm and density. */
static float find_code_costs(const CellScan *scan, const Hit *hit) {
  const Part *part = scan->work->parts + hit->part;
  float cost = find_half_norm(scan, hit);
  if (part->densities)
    cost += scan->request->density_step * (float)(part->densities[hit->item] - ZERO_DENSITY);
  return cost;
}

/* Make hits of the kept items above the limit. Until finish_hits(), their rows are positions and
   their beams are cells. If embeddings are compared next, their scores are products by rounded
   tables; refine_scores() then replaces those of the best hits. */
static inline __attribute__((always_inline)) int keep_shortlist(CellScan *scan, const int codes) {
  Work *w = scan->work;
  Kept *kept = w->kept.at;
  int16_t *sums = w->sums.at;
  int is_compared = scan->request->compared_k > 0;
  int64_t count = 0;
  for (int64_t i = 0; i < scan->num_kept; i++) { /* without branches, as in partition() */
    int16_t sum = sums[i];
    kept[count] = kept[i];
    sums[count] = sum;
    count += sum > scan->limit;
  }
  if (!reserve(&w->hit_buffer, w->num_hits + count, sizeof(Hit))) return NO_MEMORY;
  Hit *hits = w->hit_buffer.at;
  for (int64_t i = 0; i < count; i++) {
    if (i + 8 < count)
      __builtin_prefetch(w->parts[kept[i + 8].part].table->items + kept[i + 8].position);
    const Part *part = w->parts + kept[i].part;
    int64_t position = kept[i].position, item = part->table->items[position];
    if (item < 0 || item >= part->table->num_items) return DAMAGED;
    Hit hit = {kept[i].part, item, position, kept[i].cell, 0, 0};
    if (is_compared)
      hit.score = scan->origin + scan->step * (float)sums[i] + find_half_norm(scan, &hit);
    else
      hit.score = multiply_codes_of(scan, &hit, codes) - find_code_costs(scan, &hit);
    hits[w->num_hits++] = hit;
  }
  return 1;
}

/* Compute the products of hits with a query without rounding. */
static void multiply_hits(const CellScan *scan, Hit *hits, int64_t n) {
  switch (scan->model->fine_codes) {
#define CASE(codes) \
  case codes: \
    for (int64_t i = 0; i < n; i++) hits[i].score = multiply_codes_of(scan, hits + i, codes); \
    break;
    CASE(8) CASE(16) CASE(24) CASE(32) CASE(40) CASE(48) CASE(56) CASE(64)
#undef CASE
  }
}

/* Return the largest difference between an exact score and one by rounded tables. A table's
   rounding error is uniform in half a step up and down, so it has a variance of step^2 / 12. */
static float rounding_error(const CellScan *scan) {
  enum { DEVIATIONS = 6 };
  return DEVIATIONS * scan->step * sqrtf((float)scan->model->fine_codes / 12);
}

/* Keep the best hits by codes, in order. */
static int rank_hits(Work *w, int64_t first, int64_t k) {
  int64_t n = w->num_hits - first;
  k = k < n ? k : n;
  if (!reserve(&w->keys, n, sizeof(uint64_t)) || !reserve(&w->chosen, k, sizeof(Hit)))
    return NO_MEMORY;
  Hit *hits = (Hit *)w->hit_buffer.at + first, *chosen = w->chosen.at;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < n; i++) keys[i] = make_key(hits[i].score, i);
  sort_keys(keys, n, k);
  for (int64_t i = 0; i < k; i++) chosen[i] = hits[(uint32_t)keys[i]];
  memcpy(hits, chosen, (size_t)k * sizeof(Hit));
  w->num_hits = first + k;
  return 1;
}

/* Replace the positions of hits by the rows of their IDs; no hit has a beam. */
static void finish_hits(Work *w, int64_t first) {
  for (Hit *hit = (Hit *)w->hit_buffer.at + first; hit < (Hit *)w->hit_buffer.at + w->num_hits;
       hit++) {
    const Table *table = w->parts[hit->part].table;
    hit->row = first_at_least(table->bucket_starts, table->rows, hit->row + 1) - 1;
    hit->beam = 0;
  }
}

/* Find the items of a query's shortlist; all of them if request->k is 0. */
static int rank_by_cells(CellScan *scan) {
  const Model *m = scan->model;
  const Request *request = scan->request;
  Work *w = scan->work;
  int64_t count;
  int32_t first_limit, last_limit;
  scan->shortlist = request->k ? request->k : INT64_MAX / 4;
  /* Sums of bytes choose the items; without embeddings, exact scores then choose the hits. */
  if (!request->compared_k) scan->shortlist = 4 * request->k + MIN_SHORTLIST;
  scan->next_limit = 2 * scan->shortlist;
  round_bases(scan);
  fill_tables(scan, w->scaled.at);
  choose_limits(scan, &first_limit, &last_limit);
  int status = list_modalities(scan, first_limit, 32767, &count);
  if (status < 0) return status;
  const int16_t *bases = w->bases.at;
  scan->best = NO_LIMIT;
  for (int64_t c = 0; c < count; c++) scan->best = bases[c] > scan->best ? bases[c] : scan->best;
  scan->origin = (float)scan->best / scan->unit + scan->smallest;
  if ((status = scan_cells(scan, count)) < 0) return status;
  if (first_limit > last_limit) {
    scan->limit = find_limit(w->sums.at, scan->num_kept, scan->shortlist, scan->limit);
    if (scan->limit > NO_LIMIT) {
      /* An item needs a base that is short of the limit by at most the usual sum over fine codes
         and ``margin`` deviations of it. */
      float missing = (float)scan->limit * scan->step - scan->mean;
      missing -= request->margin * scan->deviation;
      float least = (float)scan->best + missing * scan->unit;
      if (least > (float)first_limit) least = (float)first_limit;
      if (least > (float)last_limit) last_limit = (int32_t)least;
    }
    if (last_limit < first_limit) {
      if ((status = list_modalities(scan, last_limit, first_limit, &count)) < 0) return status;
      if ((status = scan_cells(scan, count)) < 0) return status;
    }
  }
  scan->limit = find_limit(w->sums.at, scan->num_kept, scan->shortlist, scan->limit);
  switch (m->fine_codes) {
#define CASE(codes) \
  case codes: return keep_shortlist(scan, codes);
    CASE(8) CASE(16) CASE(24) CASE(32) CASE(40) CASE(48) CASE(56) CASE(64)
#undef CASE
    default: return DAMAGED;
  }
}
