// Which blocks come and which go: top_missing and select, as the reference has them, the lower block first among equals.
#include "kernels.h"
#include "ranking.h"
#include "status.h"
#include "threads.h"
#include "workspace.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace oasis {
namespace {

// Ranking takes longer than reading what is ranked: counted as this many times the bytes.
constexpr int64_t kWorkPerByte = 4;

// The masses of one head's candidates, low <= block < high, and what is resident among them.
class Ranking {
  public:
    Ranking(const float *mass, int64_t blocks, int64_t low, int64_t high, const int64_t *resident, int64_t places)
        : mass_(mass), blocks_(blocks), low_(std::clamp<int64_t>(low, 0, blocks)),
          high_(std::clamp<int64_t>(high, low_, blocks)), resident_(resident), places_(places) {
        const int64_t range = high_ - low_;
        Parts parts;
        const auto orders = parts.add<int32_t>(range), numbers = parts.add<int32_t>(range), room = parts.add<int32_t>(range);
        const auto missing = parts.add<Candidate>(range);
        const auto taken = parts.add<uint8_t>(blocks);
        parts.allocate();
        orders_ = parts.at<int32_t>(orders), numbers_ = parts.at<int32_t>(numbers), room_ = parts.at<int32_t>(room);
        missing_ = parts.at<Candidate>(missing);
        taken_ = parts.at<uint8_t>(taken);
    }

    // Finds at least the best `count` of all candidates, in no order.
    void find(int64_t count) {
        count = std::min(count, high_ - low_);
        if (count > 0) num_found_ = kernels().collect_best(mass_, low_, high_, count, orders_, numbers_, room_);
    }

    // The mass of the count-th best candidate, -1 if there are fewer.
    float at_rank(int64_t count) const {
        return count > num_found_ ? -1.0f : mass_of(kernels().kth_largest(orders_, num_found_, count, 0));
    }

    // How many of the best `count` have at least this mass; NaN has not.
    int64_t reaching(float mass, int64_t count) const {
        if (num_found_ == 0) return 0;
        const int64_t nans = kernels().count_at_least(orders_, num_found_, INT32_MAX);
        return std::min(count, kernels().count_at_least(orders_, num_found_, ordered(mass))) - std::min(count, nans);
    }

    // The best `count` that are not resident, best first; EMPTY where the mass is below 0 or there is none.
    void best_missing(int64_t count, int64_t *blocks, float *mass) {
        std::fill_n(taken_, blocks_, uint8_t{0});
        for (int64_t i = 0; i < places_; ++i)
            if (resident_[i] >= 0 && resident_[i] < blocks_) taken_[resident_[i]] = 1;
        int64_t among = 0;
        for (int64_t i = 0; i < num_found_; ++i) {
            room_[among] = orders_[i];
            missing_[among] = candidate(orders_[i], numbers_[i]);
            among += taken_[numbers_[i]] == 0;
        }
        if (among > count && count > 0) {
            const Candidate least = candidate(kernels().kth_largest(room_, among, count, 0), 0xffffffff); // of its equals the last
            among = std::copy_if(missing_, missing_ + among, missing_, [&](Candidate c) { return c >= least; }) - missing_;
        }
        std::sort(missing_, missing_ + among, std::greater<>());
        // Whatever is no missing candidate counts as -1; so does one of less.
        std::fill_n(blocks, count, OASIS_EMPTY);
        std::fill_n(mass, count, -1.0f);
        for (int64_t i = 0; i < std::min(among, count); ++i) {
            const int64_t block = block_of(missing_[i]);
            if (mass_[block] < -1.0f) break;
            mass[i] = mass_[block];
            if (!(mass_[block] < 0.0f)) blocks[i] = block;
        }
    }

  private:
    const float *mass_;
    int64_t blocks_, low_, high_;
    const int64_t *resident_;
    int64_t places_, num_found_ = 0;
    int32_t *orders_, *numbers_, *room_;
    Candidate *missing_;
    uint8_t *taken_;
};

// A place of the working set as selection sees it; the least one goes first.
struct Place {
    int32_t worth;
    int64_t selected_at;
    int64_t number;
    bool operator<(const Place &other) const {
        if (worth != other.worth) return worth < other.worth;
        return selected_at != other.selected_at ? selected_at < other.selected_at : number < other.number;
    }
};

// NaN if either is, as torch has it.
float maximum(float a, float b) { return a != a ? a : b != b ? b : std::max(a, b); }

// What one head would swap, before the heads of its sequence share what may be loaded.
struct Head {
    const oasis_select_args &a;
    int64_t sequence, number; // number: counted over all sequences
    int64_t hits = 0, wanted = 0;

    // Fills the head's places, blocks and gains. A pair that is no swap has an EMPTY block. `order` is room to work in.
    void propose(float *gains, std::vector<Place> &order) {
        const float floor = a.floor[sequence];
        const int64_t low = a.low[sequence], high = a.high[sequence], at = number * a.places;
        const float *mass = a.mass + number * a.blocks;
        const int64_t *resident = a.resident + at;
        Ranking ranking(mass, a.blocks, low, high, resident, a.places);
        ranking.find(a.places + a.swaps); // at most `places` of them are resident
        const int64_t most = std::min(a.places, a.blocks);
        const float least = std::max(floor, 0.0f), threshold = most == 0 ? least : maximum(ranking.at_rank(most), least);
        wanted = ranking.reaching(least, most);

        std::vector<int32_t> cheapness(static_cast<size_t>(a.places));
        for (int64_t c = 0; c < a.places; ++c) {
            const int64_t block = resident[c];
            const bool eligible = block >= low && block < high && a.blocks > 0;
            const float held = eligible ? mass[std::clamp<int64_t>(block, 0, a.blocks - 1)] : -1.0f;
            const bool hit = eligible && held >= threshold;
            hits += hit;
            a.new_selected_at[at + c] = hit ? a.step : a.selected_at[at + c];
            a.kept[at + c] = block >= 0 && floor >= 0.0f && held < a.keep * floor ? OASIS_EMPTY : block;
            cheapness[static_cast<size_t>(c)] = ~ordered(block >= 0 ? held : floor);
        }
        if (a.swaps > 0) worst_places(cheapness, order);

        int64_t *blocks = a.swap_blocks + number * a.swaps, *places = a.swap_places + number * a.swaps;
        ranking.best_missing(a.swaps, blocks, gains);
        for (int64_t k = 0; k < a.swaps; ++k) {
            const Place &place = order[static_cast<size_t>(k)];
            const float lost = mass_of(place.worth);
            const bool replaces = resident[place.number] >= 0 && lost >= 0.0f;
            places[k] = place.number;
            if (!(gains[k] > least && (!replaces || gains[k] > lost + a.margin))) blocks[k] = OASIS_EMPTY;
            gains[k] -= lost < 0.0f ? 0.0f : lost;
        }
    }

    // At least the `swaps` places that go first, in that order.
    void worst_places(const std::vector<int32_t> &cheapness, std::vector<Place> &order) const {
        const int32_t bound = kernels().kth_largest(cheapness.data(), a.places, a.swaps, 0);
        for (int64_t c = 0; c < a.places; ++c)
            if (const int32_t cheap = cheapness[static_cast<size_t>(c)]; cheap >= bound)
                order.push_back({~cheap, a.new_selected_at[number * a.places + c], c});
        std::sort(order.begin(), order.end());
    }

    void settle() const {
        const int64_t at = number * a.places;
        for (int64_t k = number * a.swaps; k < (number + 1) * a.swaps; ++k) {
            if (a.swap_blocks[k] < 0) {
                a.swap_places[k] = OASIS_EMPTY;
                continue;
            }
            a.new_selected_at[at + a.swap_places[k]] = a.step;
            a.kept[at + a.swap_places[k]] = OASIS_EMPTY;
        }
    }
};

// Leaves of the swaps of one sequence the `pooled` that gain most; among equals, those of the first heads.
void share(int64_t *blocks, const float *gains, int64_t count, int64_t pooled) {
    if (pooled >= count) return;
    std::vector<Candidate> swaps;
    for (int64_t i = 0; i < count; ++i)
        if (blocks[i] >= 0) swaps.push_back(candidate(ordered(gains[i]), i));
    if (static_cast<int64_t>(swaps.size()) <= pooled) return;
    std::nth_element(swaps.begin(), swaps.begin() + pooled, swaps.end(), std::greater<>());
    for (auto left_out = swaps.begin() + pooled; left_out != swaps.end(); ++left_out) blocks[block_of(*left_out)] = OASIS_EMPTY;
}

bool sizes_fit(int64_t blocks, int64_t kv_heads) {
    if (kv_heads >= 1 && blocks <= INT32_MAX) return true;
    fail(OASIS_INVALID, "kv_heads is %lld and there are %lld blocks", static_cast<long long>(kv_heads), static_cast<long long>(blocks));
    return false;
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_top_missing(const oasis_top_missing_args *args) {
    const auto &a = *args;
    if (!sizes_fit(a.blocks, a.kv_heads)) return OASIS_INVALID;
    const int64_t heads = a.sequences * a.kv_heads;
    parallel_for(heads, a.num_threads, heads * a.blocks * 4 * kWorkPerByte, [&](int64_t head) {
        const int64_t sequence = head / a.kv_heads;
        Ranking ranking(a.mass + head * a.blocks, a.blocks, a.low[sequence], a.high[sequence], a.resident + head * a.places, a.places);
        ranking.find(a.count + a.places);
        ranking.best_missing(a.count, a.best_blocks + head * a.count, a.best_mass + head * a.count);
    });
    return OASIS_OK;
}

extern "C" int32_t oasis_select(const oasis_select_args *args) {
    const auto &a = *args;
    if (!sizes_fit(a.blocks, a.kv_heads)) return OASIS_INVALID;
    if (a.swaps > a.places || a.swaps > a.blocks) return fail(OASIS_INVALID, "more swaps than places or blocks");
    const int64_t heads = a.sequences * a.kv_heads;
    std::vector<float> gains(static_cast<size_t>(heads * a.swaps));
    std::vector<Head> states;
    for (int64_t i = 0; i < heads; ++i) states.push_back({a, i / a.kv_heads, i});
    parallel_for(heads, a.num_threads, heads * a.blocks * 4 * kWorkPerByte, [&](int64_t head) {
        std::vector<Place> order;
        states[static_cast<size_t>(head)].propose(gains.data() + head * a.swaps, order);
    });
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t first = s * a.kv_heads;
        share(a.swap_blocks + first * a.swaps, gains.data() + first * a.swaps, a.kv_heads * a.swaps, std::max<int64_t>(a.pooled, 0));
        a.counts[2 * s] = a.counts[2 * s + 1] = 0;
        for (int64_t h = first; h < first + a.kv_heads; ++h) {
            const Head &head = states[static_cast<size_t>(h)];
            head.settle();
            a.counts[2 * s] += head.hits;
            a.counts[2 * s + 1] += head.wanted;
        }
    }
    return OASIS_OK;
}
