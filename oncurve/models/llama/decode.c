/* Decoding on a CPU: some tokens for some slots in one call, sampling included.

A tiny model spends its time between operations: a token step is some 350 of them in torch. Here it is one function. Slots do
not look at each other, so threads share the slots and meet only when the call returns. Every number of a slot is computed in
an order that does not depend on which slots are decoded beside it.

Where it can't be built, torch decodes.

Legend: S slots = N blocks x R, M slots of this call, D hidden size, H/K query/key heads, d head size, I size of the gated
unit, V vocabulary, T most new tokens. */

#include "vectors.h"

#define PAGE 64 /* positions of a page of keys and values, as in engines/native/kv_cache.py */

typedef struct {
    const float *before, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *between, *gate_up, *down;
    float *prompt_k, *prompt_v; /* [pages, N, K, d, PAGE] and [pages, N, K, PAGE, d] */
    float *suffix_k, *suffix_v; /* [pages, N, K, R, d, PAGE] and [pages, N, K, R, PAGE, d] */
    int64_t window;             /* 0: none */
} Layer;

typedef struct {
    int64_t layers, D, H, K, d, I, V;
    float eps, head_eps, scale, logit_scale, softcap; /* softcap 0: none */
    const float *words, *last, *head, *head_bias, *cos, *sin; /* cos, sin: [positions, d], the sine's first half negated */
    const Layer *layer;
    int64_t N, R, T, min_new, ends;
    const int64_t *end_ids;
    float temperature;
    int64_t *token, *suffix_length;   /* [S], brought up to date */
    const int64_t *prompt_length;     /* [S] */
    const double *uniform;            /* [S, T] */
    int64_t *drawn;                   /* [steps, S] */
    float *logp;                      /* [steps, S, 3]: scaled by temperature, as drawn from, at temperature 1 */
} Model;

int64_t panel(void) { return NR; }

/* A linear layer's weight as torch holds it, [columns, rows], in panels; and the same for products with its transpose. */
void pack(const float *w, int64_t columns, int64_t rows, float *out) { pack_any(w, rows, columns, 1, rows, rows, out); }
void pack_transposed(const float *w, int64_t columns, int64_t rows, float *out) {
    pack_any(w, columns, rows, rows, 1, columns, out);
}

/* A new token: the block it belongs to, its place among the block's slots (-1: it is part of the prompt), how many stored
positions of the prompt it sees, and its own position. */
typedef struct { int64_t block, own, prompt, position; } Row;

/* The page that position j of a row lies in, counted in pages of one key head, among the prompts' or the suffixes'. */
INLINE int64_t page_of(const Model *m, const Row *row, int64_t g, int64_t j, int own) {
    int64_t shared = (j / PAGE * m->N + row->block) * m->K + g;
    return own ? shared * m->R + row->own : shared;
}

/* e^(score) of a page's positions from .. to - 1 for one query, and zero for the others; keys lie as [d, PAGE]. */
INLINE void score_page(const float *q, const float *k, int64_t d, float scale, int64_t from, int64_t to, float *s) {
    for (int64_t c = 0; c < PAGE; c += 4 * VL) {
        vec acc[4] = {{0}};
        for (int64_t i = 0; i < d; i++)
            for (int v = 0; v < 4; v++) acc[v] += q[i] * *(const vec *)(k + i * PAGE + c + v * VL);
        for (int v = 0; v < 4; v++) *(vec *)(s + c + v * VL) = acc[v] * scale;
    }
    for (int64_t j = 0; j < from; j++) s[j] = -1e30f;
    for (int64_t j = to; j < PAGE; j++) s[j] = -1e30f;
}

/* Attention of one new token to its block's prompt and its own suffix, page after page. nv = d / VL. */
INLINE void attend_as(const Model *m, const Layer *layer, const Row *row, const float *q, float *out, float *s, int64_t nv) {
    int64_t d = nv * VL, rep = m->H / m->K, total = row->position + 1, hidden = layer->window ? total - layer->window : 0;
    for (int64_t h = 0; h < m->H; h++, q += d, out += d) {
        float *at = s;
        vec acc[2][nv];
        for (int64_t v = 0; v < 2 * nv; v++) acc[v / nv][v % nv] = (vec){0};
        for (int own = 0; own < 2; own++) { /* hidden: positions that the window leaves behind */
            int64_t length = own ? total - row->prompt : row->prompt, skip = own ? hidden - row->prompt : hidden;
            for (int64_t j = skip > 0 ? skip / PAGE * PAGE : 0; j < length; j += PAGE, at += PAGE)
                score_page(q, (own ? layer->suffix_k : layer->prompt_k) + page_of(m, row, h / rep, j, own) * PAGE * d, d, m->scale,
                           skip > j ? skip - j : 0, length - j < PAGE ? length - j : PAGE, at);
        }
        float by = (float)(1.0 / exp_all(s, at - s, top_of(s, at - s), 1.0f));
        at = s;
        for (int own = 0; own < 2; own++) {
            int64_t length = own ? total - row->prompt : row->prompt, skip = own ? hidden - row->prompt : hidden;
            for (int64_t j = skip > 0 ? skip / PAGE * PAGE : 0; j < length; j += PAGE, at += PAGE) {
                const float *v = (own ? layer->suffix_v : layer->prompt_v) + page_of(m, row, h / rep, j, own) * PAGE * d;
                int64_t n = length - j < PAGE ? length - j : PAGE;
                for (int64_t i = skip > j ? skip - j : 0; i < n; i++)
                    for (int64_t c = 0; c < nv; c++) acc[i % 2][c] += at[i] * *(const vec *)(v + i * d + c * VL);
            }
        }
        for (int64_t c = 0; c < nv; c++) *(vec *)(out + c * VL) = (acc[0][c] + acc[1][c]) * by;
    }
}

static void attend(const Model *m, const Layer *layer, const Row *row, const float *q, float *out, float *s) {
    switch (m->d / VL) { /* known sizes keep their sums in registers */
    case 2: attend_as(m, layer, row, q, out, s, 2); break;
    case 4: attend_as(m, layer, row, q, out, s, 4); break;
    case 8: attend_as(m, layer, row, q, out, s, 8); break;
    default: attend_as(m, layer, row, q, out, s, m->d / VL);
    }
}

static int is_end(const Model *m, int64_t token) {
    for (int64_t i = 0; i < m->ends; i++)
        if (m->end_ids[i] == token) return 1;
    return 0;
}

/* One token from logits z by inverting the cumulative distribution at u (greedy where the temperature is 0); end tokens are
barred before the minimum length. z is padded with -1e30 to whole vectors; p is scratch of as many numbers. */
static int64_t draw(const Model *m, const float *z, double u, int64_t at, float *p, float *logp) {
    int64_t V = m->V, wide = (V + VL - 1) / VL * VL, token = -1;
    int bar = at < m->min_new;
    float top = top_of(z, wide), by = m->temperature == 0 ? 1.0f : 1.0f / m->temperature;
    memcpy(p, z, (size_t)wide * sizeof(float));
    double total = exp_all(p, wide, top, by);
    float scaled = (float)log(total), raw = scaled; /* log-sum-exps, less the largest logit */
    if (by != 1) {
        memcpy(p, z, (size_t)wide * sizeof(float));
        raw = (float)log(exp_all(p, wide, top, 1.0f));
        memcpy(p, z, (size_t)wide * sizeof(float));
        exp_all(p, wide, top, by);
    }
    if (m->temperature == 0) {
        for (int64_t i = 0; i < V; i++)
            if ((token < 0 || z[i] > z[token]) && !(bar && is_end(m, i))) token = i;
        logp[0] = logp[2] = z[token] - top - raw;
        logp[1] = 0;
        return token;
    }
    for (int64_t i = 0; bar && i < m->ends; i++) p[m->end_ids[i]] = 0;
    double kept = 0, sum = 0;
    for (int64_t i = 0; i < V; i++) kept += p[i];
    for (token = 0; token < V - 1; token++)
        if ((sum += p[token]) > u * kept) break;
    while (token && p[token] == 0) token--; /* u within rounding of 1, and the last tokens barred */
    logp[0] = (z[token] - top) * by - scaled;
    logp[1] = bar ? (z[token] - top) * by - (float)log(kept) : logp[0];
    logp[2] = z[token] - top - raw;
    return token;
}

typedef struct { float *x, *h, *qkv, *attended, *both, *logits, *scores, *p; Row *row; } Scratch;

/* Rows through one layer. Where `keys_only`, its keys and values are all that is asked for. */
static void decoder_layer(const Model *m, const Layer *layer, int64_t M, int keys_only, Scratch *w) {
    int64_t D = m->D, H = m->H, K = m->K, d = m->d, I = m->I, Q = (H + 2 * K) * d;
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, layer->before, D, m->eps, w->h + i * D);
    product(M, D, Q, w->h, D, layer->qkv, layer->qkv_bias, 0, w->qkv, Q);
    for (int64_t i = 0; i < M; i++) {
        const Row *row = w->row + i;
        float *q = w->qkv + i * Q;
        for (int64_t g = 0; g < H + K; g++) {
            const float *weight = g < H ? layer->q_norm : layer->k_norm;
            if (weight) rms_norm(q + g * d, weight, d, m->head_eps, q + g * d);
            rotate(q + g * d, m->cos + row->position * d, m->sin + row->position * d, d);
        }
        int own = row->own >= 0;
        int64_t at = own ? row->position - row->prompt : row->position;
        for (int64_t g = 0; g < K; g++) {
            int64_t page = page_of(m, row, g, at, own) * PAGE * d;
            float *k = (own ? layer->suffix_k : layer->prompt_k) + page + at % PAGE;
            for (int64_t j = 0; j < d; j++) k[j * PAGE] = q[(H + g) * d + j];
            memcpy((own ? layer->suffix_v : layer->prompt_v) + page + at % PAGE * d, q + (H + K + g) * d, (size_t)d * sizeof(float));
        }
    }
    if (keys_only) return;
    for (int64_t i = 0; i < M; i++) attend(m, layer, w->row + i, w->qkv + i * Q, w->attended + i * H * d, w->scores);
    product(M, H * d, D, w->attended, H * d, layer->out, layer->out_bias, 1, w->x, D);
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, layer->between, D, m->eps, w->h + i * D);
    product(M, D, 2 * I, w->h, D, layer->gate_up, 0, 0, w->both, 2 * I);
    for (int64_t i = 0; i < M; i++)
        for (float *gate = w->both + i * 2 * I, *up = gate + I, *end = up; gate < end; gate += VL, up += VL)
            *(vec *)gate = *(vec *)gate / (1.0f + exp_of(-*(vec *)gate)) * *(vec *)up;
    product(M, I, D, w->both, 2 * I, layer->down, 0, 1, w->x, D);
}

/* One token for each of M slots; MR of them at a time for the logits, which are the widest. */
static void step(const Model *m, const int64_t *slots, int64_t M, int64_t n, Scratch *w) {
    int64_t D = m->D, V = m->V, ldv = padded(V);
    for (int64_t i = 0; i < M; i++) {
        int64_t slot = slots[i], prompt = m->prompt_length[slot];
        w->row[i] = (Row){slot / m->R, slot % m->R, prompt, prompt + m->suffix_length[slot]};
        memcpy(w->x + i * D, m->words + m->token[slot] * D, (size_t)D * sizeof(float));
    }
    for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, 0, w);
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, m->last, D, m->eps, w->h + i * D);
    for (int64_t first = 0; first < M; first += MR) {
        product(MR, D, V, w->h + first * D, D, m->head, m->head_bias, 0, w->logits, ldv);
        for (int64_t i = first; i < first + MR && i < M; i++) {
            int64_t slot = slots[i], at = m->suffix_length[slot];
            float *z = w->logits + (i - first) * ldv;
            if (m->logit_scale != 1)
                for (int64_t j = 0; j < V; j++) z[j] *= m->logit_scale;
            if (m->softcap != 0)
                for (int64_t j = 0; j < V; j++) z[j] = m->softcap * tanhf(z[j] / m->softcap);
            for (int64_t j = V; j < ldv; j++) z[j] = -1e30f;
            int64_t token = draw(m, z, m->uniform[slot * m->T + at], at, w->p, m->logp + (n * m->N * m->R + slot) * 3);
            m->token[slot] = m->drawn[n * m->N * m->R + slot] = token;
            m->suffix_length[slot] = at + 1;
        }
    }
}

static int take(const Model *m, int64_t rows, int64_t longest, Scratch *w) {
    int64_t scores = longest + 2 * PAGE;
    w->x = calloc((size_t)(rows * m->D), sizeof(float));
    w->h = calloc((size_t)(rows * m->D), sizeof(float));
    w->qkv = calloc((size_t)(rows * (m->H + 2 * m->K) * m->d), sizeof(float));
    w->attended = calloc((size_t)(rows * m->H * m->d), sizeof(float));
    w->both = calloc((size_t)(rows * 2 * m->I), sizeof(float));
    w->logits = calloc((size_t)(MR * padded(m->V)), sizeof(float));
    w->scores = calloc((size_t)scores, sizeof(float));
    w->p = calloc((size_t)padded(m->V), sizeof(float));
    w->row = calloc((size_t)rows, sizeof(Row));
    return w->x && w->h && w->qkv && w->attended && w->both && w->logits && w->scores && w->p && w->row;
}

static void give_back(Scratch *w) {
    free(w->x), free(w->h), free(w->qkv), free(w->attended), free(w->both), free(w->logits), free(w->scores), free(w->p);
    free(w->row);
}

/* Up to `steps` tokens for each of `count` slots; a slot that draws an end token past its minimum, or its last token, goes no
further. `slots` is used up. Returns 0, or 1 where there is no memory. */
int decode(const Model *m, int64_t *slots, int64_t count, int64_t steps) {
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++)
        longest = m->prompt_length[slots[i]] > longest ? m->prompt_length[slots[i]] : longest;
    Scratch w;
    int ready = take(m, (count + MR - 1) / MR * MR, longest + m->T, &w);
    for (int64_t n = 0; n < steps && ready && count; n++) {
        step(m, slots, count, n, &w);
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t slot = slots[i], at = m->suffix_length[slot];
            if (at < m->T && !(is_end(m, m->token[slot]) && at > m->min_new)) slots[left++] = slot;
        }
        count = left;
    }
    give_back(&w);
    return !ready;
}

/* Keys and values of a prompt's tokens but the last, into its block, CHUNK rows at a time. */
#define CHUNK (MR * 8)
int prefill(const Model *m, int64_t block, const int64_t *ids, int64_t length) {
    Scratch w;
    int ready = take(m, CHUNK, length, &w);
    for (int64_t from = 0; from < length && ready; from += CHUNK) {
        int64_t M = length - from < CHUNK ? length - from : CHUNK;
        for (int64_t i = 0; i < M; i++) {
            w.row[i] = (Row){block, -1, from + i + 1, from + i};
            memcpy(w.x + i * m->D, m->words + ids[from + i] * m->D, (size_t)m->D * sizeof(float));
        }
        for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, l == m->layers - 1, &w);
    }
    give_back(&w);
    return !ready;
}
