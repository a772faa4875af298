/* The best of many

   Scores are sorted by keys of 64 bits: the upper 32 ascend as scores descend, the lower 32 are the
   order of what is sorted, so that equal scores keep their order. */

static inline uint64_t make_key(float score, int64_t order) {
  uint32_t bits;
  score += 0.0f; /* no negative zero */
  memcpy(&bits, &score, sizeof bits);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  return (uint64_t)bits << 32 | (uint32_t)order;
}

static uint64_t pick_pivot(const uint64_t *keys, int64_t n) { /* the median of three */
  uint64_t a = keys[0], b = keys[n / 2], c = keys[n - 1], low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

/* Move the keys below a pivot to the front; return their number. */
static int64_t partition(uint64_t *keys, int64_t n, uint64_t pivot) {
  int64_t smaller = 0;
  for (int64_t i = 0; i < n; i++) { /* without branches, which would be guessed wrong */
    uint64_t key = keys[i];
    keys[i] = keys[smaller];
    keys[smaller] = key;
    smaller += key < pivot;
  }
  return smaller;
}

/* Sort keys such that at least the first ``needed`` are in their places. */
static void sort_keys(uint64_t *keys, int64_t n, int64_t needed) {
  while (n > MAX_INSERTION_SORT && needed > 0) {
    int64_t smaller = partition(keys, n, pick_pivot(keys, n)), larger = n - smaller;
    if (smaller < larger) { /* the shorter side first, so that few calls are nested */
      sort_keys(keys, smaller, needed);
      keys += smaller, n = larger, needed -= smaller;
    } else {
      sort_keys(keys + smaller, larger, needed - smaller);
      n = smaller;
    }
  }
  for (int64_t i = 1; i < n && needed > 0; i++) {
    uint64_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

/* The limit that scores must reach to be among the k best so far. */
typedef struct {
  float *scores; /* memory for LIMIT_SLACK + 2 k */
  int64_t k, count;
  float limit; /* at most the k-th best score; -INFINITY while there are fewer */
} Limit;

static float find_kth(float *x, int64_t n,
                      int64_t k) {    /* move the k best to the front; return the k-th */
  for (int64_t low = 0, high = n;;) { /* the k-th is at low .. high */
    float pivot = x[(low + high) / 2];
    int64_t better = low, equal;
    for (int64_t i = low; i < high; i++) { /* without branches, which would be guessed wrong */
      float score = x[i];
      x[i] = x[better];
      x[better] = score;
      better += score > pivot;
    }
    if (k <= better) {
      high = better;
      continue;
    }
    equal = better;
    for (int64_t i = better; i < high; i++) {
      float score = x[i];
      x[i] = x[equal];
      x[equal] = score;
      equal += !(score < pivot);
    }
    if (k <= equal) return pivot;
    low = equal;
  }
}

static void raise_limit(Limit *limit) {
  if (!limit->k || limit->count < limit->k) return;
  limit->limit = find_kth(limit->scores, limit->count, limit->k);
  limit->count = limit->k;
}

/* Return the position of the first of ascending values that is at least ``limit``. */
static int64_t first_at_least(const int32_t *values, int64_t count, int64_t limit) {
  int64_t low = 0;
  while (count > 0) {
    int64_t half = count / 2;
    if (values[low + half] < limit)
      low += half + 1, count -= half + 1;
    else
      count = half;
  }
  return low;
}
