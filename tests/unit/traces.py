"""Checks that a trace is what Perfetto reads: Chrome's JSON trace events, "JSON Object Format"."""

from collections import defaultdict


def check(trace):
    """Types, names and order of all events. Returns the slices of each track, by the track's name."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names, tracks, open_ids, last = {}, defaultdict(list), {}, 0.0
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert not tracks, "metadata comes first"
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                assert event["tid"] not in names
                names[event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= last, "events are in the order of time"
        last = event["ts"]
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
        elif event["ph"] == "b":
            assert event["id"] not in open_ids
            open_ids[event["id"]] = event
        else:
            assert event["ph"] == "e"
            begin = open_ids.pop(event["id"])
            assert (begin["name"], begin["cat"]) == (event["name"], event["cat"])
    assert not open_ids, "all that begins ends"
    for track, slices in tracks.items():
        check_nesting(track, slices)
    return tracks


def check_nesting(track, slices):
    """A slice lies inside the one that began before it, or behind it."""
    around = []
    for event in slices:
        end = event["ts"] + event["dur"]
        while around and around[-1] <= event["ts"] + 1e-6:
            around.pop()
        assert not around or end <= around[-1] + 1e-6, f"{event['name']} of {track} ends after what is around it"
        around.append(end)
