/* Decoding on a CPU: several tokens for several slots in one call, with token sampling.

A tiny model spends its time between operations: one decode step is about 350 of them in torch. Here it is one function. Slots
do not attend to each other, so threads divide the slots and synchronise only when the call returns. Each slot's numbers are
computed in an order that does not depend on the other slots of the call.

If this file cannot be compiled, torch decodes.

Shape letters: S slots = N blocks x R slots per block, M tokens of this step, D hidden size, H/K query/KV heads, d head size, I
MLP size, V vocabulary, T max new tokens. */

#include "vectors.h"

#define PAGE 64 /* positions per page of the KV cache, as in engines/native/kv_cache.py */

typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *post_attention_norm, *gate_up, *down;
    float *prompt_k, *prompt_v; /* [pages, N, K, d, PAGE] and [pages, N, K, PAGE, d] */
    float *suffix_k, *suffix_v; /* [pages, N, K, R, d, PAGE] and [pages, N, K, R, PAGE, d] */
    int64_t window;             /* 0: no window */
} Layer;

typedef struct {
    int64_t layers, D, H, K, d, I, V;
    float eps, head_eps, scale, logit_scale, softcap; /* softcap 0: no soft cap */
    const float *embedding, *final_norm, *head, *head_bias;
    const float *cos, *sin; /* [positions, d], with the first half of sin negated */
    const Layer *layer;
    int64_t N, R, T, min_new, eos_count;
    const int64_t *eos_ids;
    float temperature;
    int64_t *token, *suffix_length;   /* [S], updated */
    const int64_t *prompt_length;     /* [S] */
    const double *uniform;            /* [S, T] */
    int64_t *sampled;                 /* [steps, S] */
    float *logp;                      /* [steps, S, 3]: scaled by temperature; of the sampled distribution; at temperature 1 */
} Model;

int64_t panel(void) { return NR; }

/* Pack a linear layer's weight as torch stores it, [columns, rows], for x W^T; and for products with its transpose. */
void pack(const float *w, int64_t columns, int64_t rows, float *out) { pack_any(w, rows, columns, 1, rows, rows, out); }
void pack_transposed(const float *w, int64_t columns, int64_t rows, float *out) {
    pack_any(w, columns, rows, rows, 1, columns, out);
}

/* A new token: its block, its slot within the block (-1: it is part of the prompt), the cached prompt positions it attends to,
and its position. */
typedef struct { int64_t block, slot, prompt, position; } Token;

/* Index of the page that holds position j for KV head g, among the pages of prompts or of suffixes. */
INLINE int64_t page_of(const Model *m, const Token *token, int64_t g, int64_t j, int own) {
    int64_t shared = (j / PAGE * m->N + token->block) * m->K + g;
    return own ? shared * m->R + token->slot : shared;
}

/* Scores of one query against positions from .. to - 1 of a page, and -1e30 for the others. Keys are [d, PAGE]. */
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

/* Attention of one new token to its block's prompt and its own suffix, page by page. nv = d / VL. */
INLINE void attend_as(const Model *m, const Layer *layer, const Token *token, const float *q, float *out, float *s,
                      int64_t nv) {
    int64_t d = nv * VL, rep = m->H / m->K, total = token->position + 1, hidden = layer->window ? total - layer->window : 0;
    for (int64_t h = 0; h < m->H; h++, q += d, out += d) {
        float *at = s;
        vec acc[2][nv];
        for (int64_t v = 0; v < 2 * nv; v++) acc[v / nv][v % nv] = (vec){0};
        for (int own = 0; own < 2; own++) { /* hidden: positions outside the window */
            int64_t length = own ? total - token->prompt : token->prompt, skip = own ? hidden - token->prompt : hidden;
            for (int64_t j = skip > 0 ? skip / PAGE * PAGE : 0; j < length; j += PAGE, at += PAGE)
                score_page(q, (own ? layer->suffix_k : layer->prompt_k) + page_of(m, token, h / rep, j, own) * PAGE * d, d,
                           m->scale, skip > j ? skip - j : 0, length - j < PAGE ? length - j : PAGE, at);
        }
        float by = (float)(1.0 / exp_all(s, at - s, max_of(s, at - s), 1.0f));
        at = s;
        for (int own = 0; own < 2; own++) {
            int64_t length = own ? total - token->prompt : token->prompt, skip = own ? hidden - token->prompt : hidden;
            for (int64_t j = skip > 0 ? skip / PAGE * PAGE : 0; j < length; j += PAGE, at += PAGE) {
                const float *v = (own ? layer->suffix_v : layer->prompt_v) + page_of(m, token, h / rep, j, own) * PAGE * d;
                int64_t n = length - j < PAGE ? length - j : PAGE;
                for (int64_t i = skip > j ? skip - j : 0; i < n; i++)
                    for (int64_t c = 0; c < nv; c++) acc[i % 2][c] += at[i] * *(const vec *)(v + i * d + c * VL);
            }
        }
        for (int64_t c = 0; c < nv; c++) *(vec *)(out + c * VL) = (acc[0][c] + acc[1][c]) * by;
    }
}

static void attend(const Model *m, const Layer *layer, const Token *token, const float *q, float *out, float *s) {
    switch (m->d / VL) { /* with a constant size the accumulators stay in registers */
    case 2: attend_as(m, layer, token, q, out, s, 2); break;
    case 4: attend_as(m, layer, token, q, out, s, 4); break;
    case 8: attend_as(m, layer, token, q, out, s, 8); break;
    default: attend_as(m, layer, token, q, out, s, m->d / VL);
    }
}

static int is_eos(const Model *m, int64_t token) {
    for (int64_t i = 0; i < m->eos_count; i++)
        if (m->eos_ids[i] == token) return 1;
    return 0;
}

/* Sample one token from logits z by inverting the cumulative distribution at u; greedy if the temperature is 0. End tokens are
banned before the minimum length. z is padded with -1e30 to a multiple of VL; p is scratch of the same size. */
static int64_t sample_token(const Model *m, const float *z, double u, int64_t at, float *p, float *logp) {
    int64_t V = m->V, wide = (V + VL - 1) / VL * VL, token = -1;
    int ban = at < m->min_new;
    float top = max_of(z, wide), by = m->temperature == 0 ? 1.0f : 1.0f / m->temperature;
    memcpy(p, z, (size_t)wide * sizeof(float));
    double total = exp_all(p, wide, top, by);
    float scaled = (float)log(total), raw = scaled; /* log-sum-exps, minus the largest logit */
    if (by != 1) {
        memcpy(p, z, (size_t)wide * sizeof(float));
        raw = (float)log(exp_all(p, wide, top, 1.0f));
        memcpy(p, z, (size_t)wide * sizeof(float));
        exp_all(p, wide, top, by);
    }
    if (m->temperature == 0) {
        for (int64_t i = 0; i < V; i++)
            if ((token < 0 || z[i] > z[token]) && !(ban && is_eos(m, i))) token = i;
        logp[0] = logp[2] = z[token] - top - raw;
        logp[1] = 0;
        return token;
    }
    for (int64_t i = 0; ban && i < m->eos_count; i++) p[m->eos_ids[i]] = 0;
    double allowed = 0, sum = 0;
    for (int64_t i = 0; i < V; i++) allowed += p[i];
    for (token = 0; token < V - 1; token++)
        if ((sum += p[token]) > u * allowed) break;
    while (token && p[token] == 0) token--; /* if u rounds to 1 and the last tokens are banned */
    logp[0] = (z[token] - top) * by - scaled;
    logp[1] = ban ? (z[token] - top) * by - (float)log(allowed) : logp[0];
    logp[2] = z[token] - top - raw;
    return token;
}

typedef struct { float *x, *h, *qkv, *attended, *gate_up, *logits, *scores, *p; Token *tokens; } Scratch;

/* Run M tokens through one layer. With `kv_only`, stop once their keys and values are in the cache. */
static void decoder_layer(const Model *m, const Layer *layer, int64_t M, int kv_only, Scratch *w) {
    int64_t D = m->D, H = m->H, K = m->K, d = m->d, I = m->I, Q = (H + 2 * K) * d;
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, layer->input_norm, D, m->eps, w->h + i * D);
    product(M, D, Q, w->h, D, layer->qkv, layer->qkv_bias, 0, w->qkv, Q);
    for (int64_t i = 0; i < M; i++) {
        const Token *token = w->tokens + i;
        float *q = w->qkv + i * Q;
        for (int64_t g = 0; g < H + K; g++) {
            const float *weight = g < H ? layer->q_norm : layer->k_norm;
            if (weight) rms_norm(q + g * d, weight, d, m->head_eps, q + g * d);
            rotate(q + g * d, m->cos + token->position * d, m->sin + token->position * d, d);
        }
        int own = token->slot >= 0;
        int64_t at = own ? token->position - token->prompt : token->position;
        for (int64_t g = 0; g < K; g++) {
            int64_t page = page_of(m, token, g, at, own) * PAGE * d;
            float *k = (own ? layer->suffix_k : layer->prompt_k) + page + at % PAGE;
            for (int64_t j = 0; j < d; j++) k[j * PAGE] = q[(H + g) * d + j];
            memcpy((own ? layer->suffix_v : layer->prompt_v) + page + at % PAGE * d, q + (H + K + g) * d,
                   (size_t)d * sizeof(float));
        }
    }
    if (kv_only) return;
    for (int64_t i = 0; i < M; i++) attend(m, layer, w->tokens + i, w->qkv + i * Q, w->attended + i * H * d, w->scores);
    product(M, H * d, D, w->attended, H * d, layer->out, layer->out_bias, 1, w->x, D);
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, layer->post_attention_norm, D, m->eps, w->h + i * D);
    product(M, D, 2 * I, w->h, D, layer->gate_up, 0, 0, w->gate_up, 2 * I);
    for (int64_t i = 0; i < M; i++)
        for (float *gate = w->gate_up + i * 2 * I, *up = gate + I, *end = up; gate < end; gate += VL, up += VL)
            *(vec *)gate = *(vec *)gate / (1.0f + exp_of(-*(vec *)gate)) * *(vec *)up;
    product(M, I, D, w->gate_up, 2 * I, layer->down, 0, 1, w->x, D);
}

/* One decode step for M slots. Logits, the widest tensor, are computed for MR slots at a time. */
static void step(const Model *m, const int64_t *slots, int64_t M, int64_t n, Scratch *w) {
    int64_t D = m->D, V = m->V, ldv = padded(V);
    for (int64_t i = 0; i < M; i++) {
        int64_t slot = slots[i], prompt = m->prompt_length[slot];
        w->tokens[i] = (Token){slot / m->R, slot % m->R, prompt, prompt + m->suffix_length[slot]};
        memcpy(w->x + i * D, m->embedding + m->token[slot] * D, (size_t)D * sizeof(float));
    }
    for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, 0, w);
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, m->final_norm, D, m->eps, w->h + i * D);
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
            int64_t token = sample_token(m, z, m->uniform[slot * m->T + at], at, w->p, m->logp + (n * m->N * m->R + slot) * 3);
            m->token[slot] = m->sampled[n * m->N * m->R + slot] = token;
            m->suffix_length[slot] = at + 1;
        }
    }
}

static int allocate(const Model *m, int64_t rows, int64_t longest, Scratch *w) {
    int64_t scores = longest + 2 * PAGE;
    w->x = calloc((size_t)(rows * m->D), sizeof(float));
    w->h = calloc((size_t)(rows * m->D), sizeof(float));
    w->qkv = calloc((size_t)(rows * (m->H + 2 * m->K) * m->d), sizeof(float));
    w->attended = calloc((size_t)(rows * m->H * m->d), sizeof(float));
    w->gate_up = calloc((size_t)(rows * 2 * m->I), sizeof(float));
    w->logits = calloc((size_t)(MR * padded(m->V)), sizeof(float));
    w->scores = calloc((size_t)scores, sizeof(float));
    w->p = calloc((size_t)padded(m->V), sizeof(float));
    w->tokens = calloc((size_t)rows, sizeof(Token));
    return w->x && w->h && w->qkv && w->attended && w->gate_up && w->logits && w->scores && w->p && w->tokens;
}

static void release(Scratch *w) {
    free(w->x), free(w->h), free(w->qkv), free(w->attended), free(w->gate_up), free(w->logits), free(w->scores), free(w->p);
    free(w->tokens);
}

/* Decode up to `steps` tokens for each of `count` slots. A slot stops at an end token past the minimum length, or at its last
token. Overwrites `slots`. Returns 0, or 1 if memory could not be allocated. */
int decode(const Model *m, int64_t *slots, int64_t count, int64_t steps) {
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++)
        longest = m->prompt_length[slots[i]] > longest ? m->prompt_length[slots[i]] : longest;
    Scratch w;
    int ready = allocate(m, (count + MR - 1) / MR * MR, longest + m->T, &w);
    for (int64_t n = 0; n < steps && ready && count; n++) {
        step(m, slots, count, n, &w);
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t slot = slots[i], at = m->suffix_length[slot];
            if (at < m->T && !(is_eos(m, m->token[slot]) && at > m->min_new)) slots[left++] = slot;
        }
        count = left;
    }
    release(&w);
    return !ready;
}

/* Prefill: write keys and values of a prompt, all but its last token, to its block of the KV cache, CHUNK tokens at a time. */
#define CHUNK (MR * 8)
int prefill(const Model *m, int64_t block, const int64_t *ids, int64_t length) {
    Scratch w;
    int ready = allocate(m, CHUNK, length, &w);
    for (int64_t from = 0; from < length && ready; from += CHUNK) {
        int64_t M = length - from < CHUNK ? length - from : CHUNK;
        for (int64_t i = 0; i < M; i++) {
            w.tokens[i] = (Token){block, -1, from + i + 1, from + i};
            memcpy(w.x + i * m->D, m->embedding + ids[from + i] * m->D, (size_t)m->D * sizeof(float));
        }
        for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, l == m->layers - 1, &w);
    }
    release(&w);
    return !ready;
}
