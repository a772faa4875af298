/* The prefixes of IDs that a query follows

   find_beams() extends prefixes level by level:

     score_codes()        how good each code is after each prefix
     list_children()      the codes that continue a prefix to allowed items
     choose_children()    the best of these
     extend_frontier()    makes them the prefixes of the next level */

/* Scores of codes

   After a prefix with the vector v (the sum of its code vectors), a code with the vector e gains

     (q - w v)·e - w |e|^2 / 2  =  q·e - w v·e - w |e|^2 / 2

   for the scaled query q and the weight w of norms. The products q·e are in ``products``, w v·e are
   sums of rows of ``gram``, and w |e|^2 / 2 are ``halves``. */

/* Compute the products of a level's code vectors and the query, unless standardize_query() has. */
static void multiply_level(const Model *m, Work *w, int64_t level, const float *query) {
  int64_t first = 0;
  if (level == m->first_level) return;
  for (int64_t l = 0; l < level; l++) first += m->sizes[l];
  multiply_rows(m->vectors + first * m->dim, m->sizes[level], m->dim, query,
                (float *)w->products.at + level * CODES);
}

/* Scale a query, and return the factor:

     p[c]   = q · (code vector c of the first semantic level)
     factor = reference / sqrt(variance of p, weighted by usage)

   usage[c] is the share of the items that the query may find with code c, and reference the
   standard deviation of such products of an item. So the products of the scaled query spread as
   those of an item, and costs are in proportion to the differences between its products. */
static float scale_query(const Request *request, const float *query, int64_t dim, float *products,
                         int64_t size, float *scaled) {
  float mean = dot(request->usage, products, size), variance = 0;
  for (int64_t c = 0; c < size; c++)
    variance += request->usage[c] * (products[c] - mean) * (products[c] - mean);
  float factor = variance > 0 && request->reference > 0 ? request->reference / sqrtf(variance) : 1;
  for (int64_t c = 0; c < size; c++) products[c] *= factor;
  for (int64_t i = 0; i < dim; i++) scaled[i] = query[i] * factor;
  return factor;
}

/* Compute the products of the first semantic level, and scale the query by them. */
static float standardize_query(const Model *m, const Request *request, const float *query,
                               Work *w) {
  float *products = (float *)w->products.at + m->first_level * CODES;
  const float *vectors = m->vectors;
  int64_t size = m->sizes[m->first_level];
  for (int64_t l = 0; l < m->first_level; l++) vectors += m->sizes[l] * m->dim;
  multiply_rows(vectors, size, m->dim, query, products);
  return scale_query(request, query, m->dim, products, size, w->scaled.at);
}

/* Score every code of a level after a prefix by nearness to the query. Levels without gram compute
   the residual r = q - w v, and r·e - w |e|^2 / 2. */
static int score_nearness(const Model *m, Work *w, int64_t level, const uint8_t *codes,
                          const float *query, float *scores) {
  const float *halves = m->halves + level * CODES,
              *products = (float *)w->products.at + level * CODES;
  if (level < m->gram_levels) {
    const float *gram = m->gram + level * CODES;
    for (int c = 0; c < CODES; c++) scores[c] = products[c] - halves[c];
    for (int64_t l = 0; l < level; l++) {
      const float *row = gram + codes[l] * m->gram_levels * CODES;
      for (int c = 0; c < CODES; c += LANES) *(vec *)(scores + c) -= *(const vec *)(row + c);
      gram += m->sizes[l] * m->gram_levels * CODES;
    }
    return 1;
  }
  if (!reserve(&w->buckets, m->dim, sizeof(float))) return 0;
  float *residual = w->buckets.at;
  const float *vectors = m->vectors;
  memcpy(residual, query, (size_t)m->dim * sizeof(float));
  for (int64_t l = 0; l < level; vectors += m->sizes[l] * m->dim, l++)
    add_scaled(residual, -m->norm_weight, vectors + codes[l] * m->dim, m->dim);
  multiply_rows(vectors, m->sizes[level], m->dim, residual, scores);
  for (int64_t c = 0; c < m->sizes[level]; c++) scores[c] -= halves[c];
  return 1;
}

/* Combine nearness and logits to log-probabilities:
   log softmax(scale * nearness + gate * logit + bias). */
static void combine_scores(const Model *m, int64_t level, const float *logits, float *scores) {
  const Generator *g = m->generator;
  float scale = g->scales[level], gate = g->gates[level], values[CODES];
  int64_t size = m->sizes[level];
  for (int64_t c = 0; c < size; c++)
    scores[c] = scale * scores[c] + gate * logits[c] + g->biases[level * CODES + c];
  memcpy(values, scores, (size_t)size * sizeof(float));
  float largest = find_largest(scores, size),
        total = largest + logf(exponentiate(values, size, largest));
  for (int64_t c = 0; c < size; c++) scores[c] -= total;
}

/* Score every code of a level after each row of the frontier. */
static int score_codes(const Model *m, Work *w, int64_t level, const float *query) {
  if (!reserve(&w->logits, w->rows * CODES, sizeof(float))) return 0;
  multiply_level(m, w, level, query);
  if (m->generator && ((level == 0 && !project_query(m, w, query)) || !run_generator(m, w, level)))
    return 0;
  for (int64_t r = 0; r < w->rows; r++) {
    float *scores = (float *)w->logits.at + r * CODES;
    const uint8_t *codes = (uint8_t *)w->codes.at + r * m->levels;
    if (!score_nearness(m, w, level, codes, query, scores)) return 0;
    if (m->generator) combine_scores(m, level, (float *)w->generated.at + r * CODES, scores);
  }
  return 1;
}

/* Children of prefixes

   A prefix is a range of rows [low, high) in the table of each part. The codes that follow it begin
   at low and at the starts of the level that are in (low, high). */

static inline int64_t count_before(const Part *part,
                                   int64_t row) { /* number of allowed rows before this one */
  int64_t word = row >> 6;
  return part->before[word] + __builtin_popcountll(part->words[word] & ((1ull << (row & 63)) - 1));
}

static inline int64_t count_rows(const Part *part, int64_t low, int64_t high) {
  return part->words ? count_before(part, high) - count_before(part, low) : high - low;
}

/* Move the keys of the best possible children to the front: ``width`` of them, or more if all IDs
   below them fit the budget. The next key is that of the best child that is not chosen. Return the
   number of IDs below the chosen children.

   As in quickselect, the keys between ``chosen`` and ``end`` are partitioned again and again: the
   better ones are chosen together, or else the worse ones are dropped together. */
static int64_t choose_children(Work *w, const Request *request, int64_t budget) {
  const Child *children = w->children.at;
  int64_t chosen = 0, end = 0, below = 0;
  if (!reserve(&w->keys, w->num_children + 1, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_children; i++) {
    keys[end] = make_key(children[i].total, i);
    end += children[i].total > -INFINITY;
  }
  keys[end] = make_key(-INFINITY, 0); /* after the worst */
  while (chosen < end) {              /* keys from ``end`` on are not chosen */
    int64_t n = end - chosen, sum = below;
    if (n <= MAX_INSERTION_SORT) {
      sort_keys(keys + chosen, n, n);
      for (; chosen < end; chosen++) {
        int64_t count = children[(uint32_t)keys[chosen]].count;
        if (chosen >= request->width && below + count > budget) break;
        below += count;
      }
      break;
    }
    int64_t better = chosen + partition(keys + chosen, n, pick_pivot(keys + chosen, n));
    for (int64_t i = chosen; i < better; i++) sum += children[(uint32_t)keys[i]].count;
    if (better <= request->width || sum <= budget)
      chosen = better, below = sum;
    else
      end = better;
  }
  w->num_keys = chosen;
  return below;
}

/* Put the chosen keys into the order of their children, whose rows are adjacent then. */
static void order_by_rows(Work *w) {
  const Child *children = w->children.at;
  uint64_t *keys = w->keys.at, last = 0;
  for (int64_t i = 0; i < w->num_keys; i++) last = keys[i] > last ? keys[i] : last;
  for (int64_t i = 0, n = 0; i < w->num_children; i++) {
    uint64_t key = make_key(children[i].total, i);
    if (n < w->num_keys) keys[n] = key;
    n += key <= last;
  }
}

/* Return the score that a child must reach to be chosen, whatever children follow: the score of the
   best child so far that is not chosen. */
static float find_least_total(Work *w, const Request *request, int64_t budget) {
  if (choose_children(w, request, budget) < 0) return -INFINITY;
  uint32_t bits = (uint32_t)(((uint64_t *)w->keys.at)[w->num_keys] >> 32);
  float score;
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  memcpy(&score, &bits, sizeof score);
  return score;
}

static inline void add_child(Work *w, int64_t row, int64_t code, int64_t count, float total,
                             const int32_t *span, int64_t num_parts) {
  int64_t n = w->num_children++;
  int32_t *spans = (int32_t *)w->spans.at + n * num_parts * 2;
  ((Child *)w->children.at)[n] = (Child){(int32_t)row, (int32_t)code, (int32_t)count, total};
  if (num_parts == 1)
    spans[0] = span[0], spans[1] = span[1];
  else
    memcpy(spans, span, (size_t)num_parts * 2 * sizeof(int32_t));
}

/* List the codes that continue each row of the frontier, by row, then by code, if they have allowed
   IDs. ``scores`` [rows][CODES] may be NULL. With scores and a single part, children that
   choose_children() would not take may be missing. */
static int list_children(const Model *m, int64_t level, const Request *request, const float *scores,
                         int64_t budget, Work *w) {
  int64_t num_parts = w->num_parts, span = num_parts * 2;
  w->num_children = 0;
  if (!reserve(&w->buckets, CODES * span, sizeof(int32_t))) return NO_MEMORY;
  int32_t *code_spans = w->buckets.at; /* [CODES][parts][2] */
  float lowest = -INFINITY;
  int64_t next_limit =
      num_parts == 1 ? 4 * CODES
                     : INT64_MAX; /* number of children after which the least total is updated */
  for (int64_t r = 0; r < w->rows; r++) {
    const int32_t *ranges = (int32_t *)w->ranges.at + r * span;
    const float *row_scores = scores ? scores + r * CODES : NULL;
    float total = ((float *)w->total.at)[r];
    int64_t counts[CODES];
    uint64_t seen[CODES / 64] = {0};
    if (lowest > -INFINITY) {
      int good = 0;
      for (int c = 0; c < CODES; c++) good |= total + row_scores[c] >= lowest;
      if (!good) continue;
    }
    if (!reserve(&w->children, w->num_children + CODES, sizeof(Child))) return NO_MEMORY;
    if (!reserve(&w->spans, (w->num_children + CODES) * span, sizeof(int32_t))) return NO_MEMORY;
    for (int64_t p = 0; p < num_parts; p++) {
      const Part *part = w->parts + p;
      const Table *table = part->table;
      int64_t low = ranges[2 * p], high = ranges[2 * p + 1], listed = 0;
      if (low >= high) continue;
      int64_t first = table->level_bounds[level], last = table->level_bounds[level + 1];
      int64_t branch = first + first_at_least(table->starts + first, last - first, low + 1);
      int code = table->ids[low * table->columns + level];
      for (;; branch++) {
        int64_t end = branch < last && table->starts[branch] < high ? table->starts[branch] : high;
        if (end <= low || code >= m->sizes[level] || listed++ >= CODES) return DAMAGED;
        float gained = row_scores ? total + row_scores[code] : 0;
        int64_t below = gained < lowest ? 0 : count_rows(part, low, end);
        if (below && (level || request->level0[code >> 3] >> (code & 7) & 1)) {
          int32_t both[2] = {(int32_t)low, (int32_t)end};
          if (num_parts == 1)
            add_child(w, r, code, below, gained, both, 1);
          else {
            int32_t *code_span = code_spans + code * span;
            if (!(seen[code >> 6] >> (code & 63) & 1)) {
              seen[code >> 6] |= 1ull << (code & 63);
              counts[code] = 0;
              memset(code_span, 0, (size_t)span * sizeof(int32_t));
            }
            code_span[2 * p] = both[0];
            code_span[2 * p + 1] = both[1];
            counts[code] += below;
          }
        }
        if (end == high) break;
        low = end;
        code = branch < table->num_start_codes ? table->start_codes[branch]
                                               : table->ids[low * table->columns + level];
      }
    }
    if (scores && w->num_children > next_limit) {
      lowest = find_least_total(w, request, budget);
      next_limit = 2 * w->num_children;
    }
    for (int code = 0; num_parts > 1 && code < CODES; code++)
      if (seen[code >> 6] >> (code & 63) & 1)
        add_child(w, r, code, counts[code], row_scores ? total + row_scores[code] : 0,
                  code_spans + code * span, num_parts);
  }
  return 1;
}

/* Make the chosen children the frontier. The buffers of both frontiers are swapped. */
static int extend_frontier(const Model *m, Work *w, int64_t num_parts, int64_t level) {
  int64_t n = w->num_keys, levels = m->levels, span = 2 * num_parts;
  if (!reserve(&w->next_codes, n * levels, 1) ||
      !reserve(&w->next_gained, n * levels, sizeof(float)) ||
      !reserve(&w->next_total, n, sizeof(float)) ||
      !reserve(&w->next_ranges, n * span, sizeof(int32_t)) ||
      !reserve(&w->parents, w->first_token + w->rows + n, sizeof(int64_t)))
    return 0;
  int64_t *parents = (int64_t *)w->parents.at + w->first_token + w->rows;
  for (int64_t i = 0; i < n; i++) {
    int64_t number = (uint32_t)((uint64_t *)w->keys.at)[i];
    const Child *child = (Child *)w->children.at + number;
    uint8_t *codes = (uint8_t *)w->next_codes.at + i * levels;
    float *gained = (float *)w->next_gained.at + i * levels;
    memcpy(codes, (uint8_t *)w->codes.at + child->row * levels, (size_t)level);
    memcpy(gained, (float *)w->gained.at + child->row * levels, (size_t)level * sizeof(float));
    codes[level] = (uint8_t)child->code;
    gained[level] = ((float *)w->logits.at)[child->row * CODES + child->code];
    ((float *)w->next_total.at)[i] = child->total;
    parents[i] = w->first_token + child->row;
    memcpy((int32_t *)w->next_ranges.at + i * span, (int32_t *)w->spans.at + number * span,
           (size_t)span * sizeof(int32_t));
  }
  swap(&w->codes, &w->next_codes);
  swap(&w->gained, &w->next_gained);
  swap(&w->total, &w->next_total);
  swap(&w->ranges, &w->next_ranges);
  w->first_token += w->rows;
  w->rows = n;
  return 1;
}

/* Find the beams of a query; return the number of levels that were decoded. */
static int64_t find_beams(const Model *m, const Request *request, const float *query, Work *w) {
  const Part *parts = w->parts;
  int64_t num_parts = w->num_parts;
  int64_t budget = request->candidates > request->width ? request->candidates : request->width;
  if (!reserve(&w->codes, m->levels, 1) || !reserve(&w->gained, m->levels, sizeof(float)) ||
      !reserve(&w->total, 1, sizeof(float)) ||
      !reserve(&w->ranges, 2 * num_parts, sizeof(int32_t)) ||
      !reserve(&w->parents, 1, sizeof(int64_t)))
    return NO_MEMORY;
  w->rows = 1;
  w->first_token = 0;
  *(int64_t *)w->parents.at = 0; /* the start token has no parent */
  *(float *)w->total.at = 0;
  double rows = 0;
  for (int64_t p = 0; p < num_parts; p++) {
    ((int32_t *)w->ranges.at)[2 * p] = 0;
    ((int32_t *)w->ranges.at)[2 * p + 1] = (int32_t)parts[p].table->rows;
    rows += parts[p].table->rows;
  }
  if (!reserve(&w->logits, CODES, sizeof(float))) return NO_MEMORY;
  int status = list_children(m, 0, request, NULL, budget, w);
  if (status < 0) return status;
  Child *children = w->children.at;
  w->below = 0;
  for (int64_t i = 0; i < w->num_children; i++) w->below += children[i].count;
  /* few allowed IDs are all ranked, without decoding: n^2 <= candidates * rows, as in beam.py */
  if (w->below <= budget || (double)w->below * w->below <= rows * request->candidates) {
    if (!reserve(&w->keys, w->num_children, sizeof(uint64_t))) return NO_MEMORY;
    for (int64_t i = 0; i < w->num_children; i++) ((uint64_t *)w->keys.at)[i] = (uint64_t)i;
    w->num_keys = w->num_children;
    return extend_frontier(m, w, num_parts, 0) ? 0 : NO_MEMORY;
  }
  for (int64_t level = 0;; level++) {
    if (!score_codes(m, w, level, query)) return NO_MEMORY;
    const float *scores = w->logits.at;
    for (int64_t i = 0; !level && i < w->num_children; i++)
      children[i].total = scores[children[i].code];
    status = level ? list_children(m, level, request, scores, budget, w) : 1;
    if (status < 0) return status;
    w->below = choose_children(w, request, budget);
    if (w->below < 0) return NO_MEMORY;
    if (w->below > budget)
      sort_keys(w->keys.at, w->num_keys, w->num_keys);
    else
      order_by_rows(w);
    if (!extend_frontier(m, w, num_parts, level)) return NO_MEMORY;
    if (w->below <= budget || level + 1 == m->levels) return level + 1;
  }
}
