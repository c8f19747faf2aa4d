/* Decoding on a CPU: several tokens for several slots in one call, with token sampling.

A tiny model spends its time between operations: one decode step is about 350 of them in torch. Here it is one function. Slots
do not attend to each other, so threads divide the slots and synchronise only when the call returns. Each slot's numbers are
computed in an order that does not depend on the other slots of the call.

Two things save rows, and neither changes a bit:
- Slots of a block with the same text so far share one row and the keys and values of their text; they part where they sample
  different tokens.
- Drafts. A row is computed in tiles of MR, so a pass has rows to spare. They take the tokens that probably come next: what
  followed the same last tokens elsewhere in the slot's own text, in those of its block, in earlier answers, or in the prompt.
  A token is a function of its logits and of its own uniform number, so a draft counts exactly if it is the token that is
  sampled anyway.

If this file cannot be compiled, torch decodes.

Shape letters: S slots = N blocks x R slots per block, M tokens of this step, D hidden size, H/K query/KV heads, d head size, I
MLP size, V vocabulary, T max new tokens, P width of the prompts' tokens, E earlier answers of a block. */

#include "vectors.h"

#define PAGE 64     /* positions per page of the KV cache, as in engines/native/kv_cache.py */
#define MIN_MATCH 2 /* a draft follows at least this many equal tokens */
#define MAX_MATCH 8 /* and at most this many are compared */
#define MAX_DRAFT 7 /* tokens of a draft */

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
    int64_t *storage;                 /* [S]: the slot that stores the keys and values of this slot's text, updated */
    int64_t *text;                    /* [S, MAX_MATCH + T]: the prompt's last tokens, then the sampled ones, updated */
    const int64_t *text_length;       /* [S]: sampled tokens in `text` before this call, those of ended sequences too */
    const int64_t *prompt;            /* [N, P] */
    int64_t P;
    int64_t sources;                  /* of drafts: 0 none, 1 the slot's own text and the prompt, 2 all others too */
    int64_t min_rows;                 /* a pass may have this many rows, and in any case a last tile that is full */
    const int64_t *earlier;           /* [N, E, MAX_MATCH + T]: as `text`, answers to a block's prompt from earlier calls */
    const int64_t *earlier_length;    /* [N, E] */
    int64_t E;
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

/* What tokens at one position are sampled from: e^((z - top) / temperature) is in p. */
typedef struct { const float *z, *p; float top, by, scaled, raw; double allowed; int ban; } Distribution;

/* The distribution of logits z. End tokens are banned before the minimum length. z is padded with -1e30 to a multiple of VL; p is
scratch of the same size. */
static Distribution distribution_of(const Model *m, const float *z, int64_t at, float *p) {
    int64_t V = m->V, wide = (V + VL - 1) / VL * VL;
    Distribution of = {z, p, max_of(z, wide), m->temperature == 0 ? 1.0f : 1.0f / m->temperature, 0, 0, 0, at < m->min_new};
    memcpy(p, z, (size_t)wide * sizeof(float));
    double total = exp_all(p, wide, of.top, of.by);
    of.scaled = of.raw = (float)log(total); /* log-sum-exps, minus the largest logit */
    if (of.by != 1) {
        memcpy(p, z, (size_t)wide * sizeof(float));
        of.raw = (float)log(exp_all(p, wide, of.top, 1.0f));
        memcpy(p, z, (size_t)wide * sizeof(float));
        exp_all(p, wide, of.top, of.by);
    }
    for (int64_t i = 0; of.ban && i < m->eos_count; i++) p[m->eos_ids[i]] = 0;
    for (int64_t i = 0; i < V; i++) of.allowed += p[i];
    return of;
}

/* Sample one token by inverting the cumulative distribution at u; greedy if the temperature is 0. */
static int64_t sample_token(const Model *m, const Distribution *of, double u, float *logp) {
    const float *z = of->z, *p = of->p;
    int64_t V = m->V, token = -1;
    if (m->temperature == 0) {
        for (int64_t i = 0; i < V; i++)
            if ((token < 0 || z[i] > z[token]) && !(of->ban && is_eos(m, i))) token = i;
        logp[0] = logp[2] = z[token] - of->top - of->raw;
        logp[1] = 0;
        return token;
    }
    double sum = 0;
    for (token = 0; token < V - 1; token++)
        if ((sum += p[token]) > u * of->allowed) break;
    while (token && p[token] == 0) token--; /* if u rounds to 1 and the last tokens are banned */
    logp[0] = (z[token] - of->top) * of->by - of->scaled;
    logp[1] = of->ban ? (z[token] - of->top) * of->by - (float)log(of->allowed) : logp[0];
    logp[2] = z[token] - of->top - of->raw;
    return token;
}

/* The longest match of the MAX_MATCH tokens before `end` with those before some position of tokens[0 .. count), the latest of
equal ones; only matches longer than *longest count. `back` tokens before tokens[0] may be compared too. */
static const int64_t *match(const int64_t *end, const int64_t *tokens, int64_t count, int64_t back, int64_t *longest) {
    const int64_t *found = 0;
    for (int64_t i = count - 1; i >= 0 && *longest < MAX_MATCH; i--) {
        int64_t n = 0, most = i + back < MAX_MATCH ? i + back : MAX_MATCH;
        while (n < most && tokens[i - 1 - n] == end[-1 - n]) n++;
        if (n > *longest) *longest = n, found = tokens + i;
    }
    return found;
}

/* The tokens that probably follow a slot's text: `most` at most, written to `draft`; returns their number. */
int64_t find_draft(const Model *m, int64_t slot, int64_t most, int64_t *draft) {
    int64_t wide = MAX_MATCH + m->T, own = m->suffix_length[slot], block = slot / m->R, longest = MIN_MATCH - 1, room = 0;
    const int64_t *text = m->text + slot * wide + MAX_MATCH, *from = match(text + own, text, own, MAX_MATCH, &longest);
    if (from) room = text + own - from;
    for (int64_t other = block * m->R; m->sources > 1 && other < (block + 1) * m->R; other++) {
        if (other == slot) continue;
        const int64_t *theirs = m->text + other * wide + MAX_MATCH, count = m->text_length[other];
        const int64_t *found = match(text + own, theirs, count, MAX_MATCH, &longest);
        if (found) from = found, room = theirs + count - found;
    }
    for (int64_t answer = block * m->E; m->sources > 1 && answer < (block + 1) * m->E; answer++) {
        const int64_t *theirs = m->earlier + answer * wide + MAX_MATCH, count = m->earlier_length[answer];
        const int64_t *found = match(text + own, theirs, count, MAX_MATCH, &longest);
        if (found) from = found, room = theirs + count - found;
    }
    const int64_t *prompt = m->prompt + block * m->P, count = m->prompt_length[slot] + 1;
    const int64_t *found = match(text + own, prompt, count, 0, &longest);
    if (found) from = found, room = prompt + count - found;
    most = from ? (room < most ? room : most) : 0;
    if (most > 0) memcpy(draft, from, (size_t)most * sizeof(int64_t));
    return most > 0 ? most : 0;
}

/* The slots that have the same text: they are a list of places in the call's slots. `row` is the first of its rows, one for the
last token and one for each token of the draft. */
typedef struct { int64_t storage, first, row, draft; int64_t tokens[MAX_DRAFT]; } Text;
/* A slot within a call: the text it belongs to, the next slot of that text, the tokens it has sampled, and how many tokens of
the draft it has accepted in this pass (-1: it has sampled another token, or has ended). */
typedef struct { int64_t text, next, made, accepted; } Member;

typedef struct {
    float *x, *h, *qkv, *attended, *gate_up, *logits, *scores, *p;
    Token *tokens;
    Text *texts;
    Member *members;
    int64_t *text_at; /* [S]: by storage, its text in this pass, -1 if there is none */
} Scratch;

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

static int has_ended(const Model *m, int64_t slot) {
    int64_t at = m->suffix_length[slot];
    return at >= m->T || (is_eos(m, m->token[slot]) && at > m->min_new);
}

/* Copy the keys and values of the first `count` positions of a slot's suffix to another slot of its block. */
static void copy_suffix(const Model *m, int64_t from, int64_t to, int64_t count) {
    Token source = {from / m->R, from % m->R, 0, 0}, target = {to / m->R, to % m->R, 0, 0};
    int64_t d = m->d;
    for (const Layer *layer = m->layer; layer < m->layer + m->layers; layer++)
        for (int64_t j = 0; j < count; j += PAGE)
            for (int64_t g = 0; g < m->K; g++) {
                int64_t a = page_of(m, &source, g, j, 1) * PAGE * d, b = page_of(m, &target, g, j, 1) * PAGE * d;
                size_t n = (size_t)(count - j < PAGE ? count - j : PAGE) * sizeof(float);
                for (int64_t i = 0; i < d; i++) memcpy(layer->suffix_k + b + i * PAGE, layer->suffix_k + a + i * PAGE, n);
                memcpy(layer->suffix_v + b, layer->suffix_v + a, n * (size_t)d);
            }
}

/* The slots of one text part if they have sampled different tokens: each new text gets a storage of its own. */
static void part(const Model *m, const int64_t *slots, const Text *text, const Member *members) {
    int64_t storage = text->storage, keeper = -1;
    for (int64_t i = text->first; i >= 0; i = members[i].next)
        if (!has_ended(m, slots[i]) && (keeper < 0 || slots[i] == storage)) keeper = i;
    for (int64_t i = text->first; i >= 0; i = members[i].next) {
        int64_t slot = slots[i], same = -1;
        if (i == keeper || has_ended(m, slot)) continue;
        for (int64_t o = text->first; o != i && same < 0; o = members[o].next)
            if (!has_ended(m, slots[o]) && m->token[slots[o]] == m->token[slot] &&
                m->suffix_length[slots[o]] == m->suffix_length[slot])
                same = slots[o];
        if (m->token[slots[keeper]] == m->token[slot] && m->suffix_length[slots[keeper]] == m->suffix_length[slot]) continue;
        if (same >= 0) {
            m->storage[slot] = m->storage[same];
        } else {
            m->storage[slot] = slot;
            copy_suffix(m, storage, slot, m->suffix_length[slot]);
        }
    }
}

/* Group the slots by text, and add drafts as far as rows are to spare. Returns the number of texts. */
static int64_t plan_rows(const Model *m, const int64_t *slots, int64_t count, int64_t steps, int64_t *rows, Scratch *w) {
    int64_t texts = 0;
    for (int64_t i = count - 1; i >= 0; i--) {
        int64_t storage = m->storage[slots[i]], *t = w->text_at + storage;
        if (*t < 0) {
            *t = texts++;
            w->texts[*t].storage = storage, w->texts[*t].first = -1;
        }
        w->members[i].text = *t, w->members[i].next = w->texts[*t].first, w->members[i].accepted = 0;
        w->texts[*t].first = i;
    }
    int64_t spare = (texts + MR - 1) / MR * MR;
    spare = (spare > m->min_rows ? spare : m->min_rows) - texts;
    *rows = 0;
    for (Text *text = w->texts; text < w->texts + texts; text++) {
        int64_t slot = slots[text->first], made = w->members[text->first].made, left = m->T - m->suffix_length[slot];
        int64_t most = (steps - made < left ? steps - made : left) - 1; /* tokens that may follow the next one */
        most = most < spare ? most : spare;
        text->draft = m->sources && most > 0 ? find_draft(m, slot, most < MAX_DRAFT ? most : MAX_DRAFT, text->tokens) : 0;
        text->row = *rows;
        spare -= text->draft;
        *rows += 1 + text->draft;
        w->text_at[text->storage] = -1;
    }
    return texts;
}

/* One pass for some slots. Logits, the widest tensor, are computed for MR rows at a time. Adds to `counts`: rows computed, tokens
drafted and drafted tokens accepted, both by slot, and slots passed. */
static void pass(const Model *m, const int64_t *slots, int64_t count, int64_t steps, Scratch *w, int64_t *counts) {
    int64_t D = m->D, V = m->V, S = m->N * m->R, ldv = padded(V), M, texts = plan_rows(m, slots, count, steps, &M, w);
    for (const Text *text = w->texts; text < w->texts + texts; text++) {
        int64_t slot = slots[text->first], prompt = m->prompt_length[slot], at = m->suffix_length[slot];
        for (int64_t n = 0; n <= text->draft; n++) {
            int64_t token = n ? text->tokens[n - 1] : m->token[slot];
            w->tokens[text->row + n] = (Token){slot / m->R, text->storage % m->R, prompt, prompt + at + n};
            memcpy(w->x + (text->row + n) * D, m->embedding + token * D, (size_t)D * sizeof(float));
        }
    }
    for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, 0, w);
    for (int64_t i = 0; i < M; i++) rms_norm(w->x + i * D, m->final_norm, D, m->eps, w->h + i * D);
    const Text *text = w->texts;
    for (int64_t row = 0; row < M; row++) {
        if (row % MR == 0) product(MR, D, V, w->h + row * D, D, m->head, m->head_bias, 0, w->logits, ldv);
        float *z = w->logits + row % MR * ldv;
        if (m->logit_scale != 1)
            for (int64_t j = 0; j < V; j++) z[j] *= m->logit_scale;
        if (m->softcap != 0)
            for (int64_t j = 0; j < V; j++) z[j] = m->softcap * tanhf(z[j] / m->softcap);
        for (int64_t j = V; j < ldv; j++) z[j] = -1e30f;
        text += row > text->row + text->draft;
        int64_t n = row - text->row, is_last = n == text->draft, ready = 0;
        Distribution of;
        for (int64_t i = text->first; i >= 0; i = w->members[i].next) {
            Member *member = w->members + i;
            if (member->accepted != n) continue;
            int64_t slot = slots[i], at = m->suffix_length[slot], out = member->made * S + slot;
            if (!ready) of = distribution_of(m, z, at, w->p), ready = 1;
            int64_t token = sample_token(m, &of, m->uniform[slot * m->T + at], m->logp + out * 3);
            m->token[slot] = m->sampled[out] = m->text[slot * (MAX_MATCH + m->T) + MAX_MATCH + at] = token;
            m->suffix_length[slot] = at + 1;
            member->made++;
            int accepts = !is_last && token == text->tokens[n] && !has_ended(m, slot);
            member->accepted = accepts ? n + 1 : -1;
            counts[2] += accepts;
        }
    }
    for (text = w->texts; text < w->texts + texts; text++) {
        for (int64_t i = text->first; i >= 0; i = w->members[i].next) counts[1] += text->draft;
        part(m, slots, text, w->members);
    }
    counts[0] += M, counts[3] += count;
}

static int allocate(const Model *m, int64_t slots, int64_t rows, int64_t longest, Scratch *w) {
    int64_t scores = longest + 2 * PAGE, S = m->N * m->R;
    w->x = calloc((size_t)(rows * m->D), sizeof(float));
    w->h = calloc((size_t)(rows * m->D), sizeof(float));
    w->qkv = calloc((size_t)(rows * (m->H + 2 * m->K) * m->d), sizeof(float));
    w->attended = calloc((size_t)(rows * m->H * m->d), sizeof(float));
    w->gate_up = calloc((size_t)(rows * 2 * m->I), sizeof(float));
    w->logits = calloc((size_t)(MR * padded(m->V)), sizeof(float));
    w->scores = calloc((size_t)scores, sizeof(float));
    w->p = calloc((size_t)padded(m->V), sizeof(float));
    w->tokens = calloc((size_t)rows, sizeof(Token));
    w->texts = calloc((size_t)(slots + 1), sizeof(Text));
    w->members = calloc((size_t)(slots + 1), sizeof(Member));
    w->text_at = malloc((size_t)S * sizeof(int64_t));
    for (int64_t i = 0; w->text_at && i < S; i++) w->text_at[i] = -1;
    return w->x && w->h && w->qkv && w->attended && w->gate_up && w->logits && w->scores && w->p && w->tokens && w->texts &&
           w->members && w->text_at;
}

static void release(Scratch *w) {
    free(w->x), free(w->h), free(w->qkv), free(w->attended), free(w->gate_up), free(w->logits), free(w->scores), free(w->p);
    free(w->tokens), free(w->texts), free(w->members), free(w->text_at);
}

/* Decode up to `steps` tokens for each of `count` slots. A slot stops at an end token past the minimum length, or at its last
token. All slots with one storage must be in the same call. Overwrites `slots`. Returns 0, or 1 if memory could not be
allocated. */
int decode(const Model *m, int64_t *slots, int64_t count, int64_t steps, int64_t *counts) {
    int64_t longest = 0, rows = (count + MR - 1) / MR * MR, min_rows = (m->min_rows + MR - 1) / MR * MR;
    for (int64_t i = 0; i < count; i++)
        longest = m->prompt_length[slots[i]] > longest ? m->prompt_length[slots[i]] : longest;
    Scratch w;
    int ready = allocate(m, count, rows > min_rows ? rows : min_rows, longest + m->T, &w);
    while (ready && count) {
        pass(m, slots, count, steps, &w, counts);
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++)
            if (w.members[i].made < steps && !has_ended(m, slots[i])) {
                w.members[left].made = w.members[i].made;
                slots[left++] = slots[i];
            }
        count = left;
    }
    release(&w);
    return !ready;
}

/* Write keys and values of tokens to the KV cache, CHUNK tokens at a time: of a prompt, or of a slot's text, whose prompt has
`prompt` positions in the cache; of a prompt, `slot` is -1. */
#define CHUNK (MR * 8)
static int store_tokens(const Model *m, int64_t block, int64_t slot, int64_t prompt, const int64_t *ids, int64_t length) {
    Scratch w;
    int ready = allocate(m, 0, CHUNK, prompt + length, &w);
    for (int64_t from = 0; from < length && ready; from += CHUNK) {
        int64_t M = length - from < CHUNK ? length - from : CHUNK;
        for (int64_t i = 0; i < M; i++) {
            w.tokens[i] = (Token){block, slot, slot < 0 ? from + i + 1 : prompt, prompt + from + i};
            memcpy(w.x + i * m->D, m->embedding + ids[from + i] * m->D, (size_t)m->D * sizeof(float));
        }
        for (int64_t l = 0; l < m->layers; l++) decoder_layer(m, m->layer + l, M, l == m->layers - 1, &w);
    }
    release(&w);
    return !ready;
}

/* Prefill a prompt, all but its last token, into its block; and a text that a slot continues, all but its last token. */
int prefill(const Model *m, int64_t block, const int64_t *ids, int64_t length) {
    return store_tokens(m, block, -1, 0, ids, length);
}
int prefill_text(const Model *m, int64_t slot, const int64_t *ids, int64_t length) {
    return store_tokens(m, slot / m->R, slot % m->R, m->prompt_length[slot], ids, length);
}
