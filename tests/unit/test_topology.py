import pytest

from oasiskv.topology import NumaNode, read_link, read_machine, read_nodes


def write(root, **files):
    for path, text in files.items():
        target = root / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


@pytest.fixture
def root(tmp_path):
    """Two sockets, as the kernel shows them."""
    write(
        tmp_path,
        proc__cpuinfo="processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz: fast\nprocessor\t: 1\nmodel name\t: Some CPU\n",
        proc__meminfo="MemTotal:       1024 kB\nMemFree:         10 kB\n",
    )
    for number, (cores, distances) in {0: ("0-15,32-47", "10 21"), 10: ("16-31", "21 10")}.items():
        node = f"sys__devices__system__node__node{number}__"
        meminfo = f"Node {number} MemTotal:  2048 kB\nNode {number} MemFree: 1 kB\n"
        write(tmp_path, **{node + "cpulist": cores + "\n", node + "distance": distances + "\n", node + "meminfo": meminfo})
    return tmp_path


def test_nodes_have_cores_memory_and_distances(root):
    assert read_nodes(root) == [
        NumaNode(0, "0-15,32-47", 2 << 20, (10, 21)),
        NumaNode(10, "16-31", 2 << 20, (21, 10)),
    ]


def test_a_machine_is_read_from_its_files(root):
    machine = read_machine(root)
    assert machine.processor == "Some CPU @ 2.0GHz: fast"
    assert machine.memory_bytes == 1 << 20
    assert len(machine.nodes) == 2


def test_a_machine_that_says_nothing_has_cores_all_the_same(tmp_path):
    machine = read_machine(tmp_path)
    assert machine.processor
    assert machine.cores >= machine.usable_cores >= 1
    assert (machine.memory_bytes, machine.nodes) == (0, ())


@pytest.mark.parametrize(("node", "expected"), [("1", 1), ("-1", None)])
def test_the_link_of_a_device(tmp_path, node, expected):
    folder = "sys__bus__pci__devices__0000:3b:00.0__"
    speed, width = folder + "current_link_speed", folder + "current_link_width"
    write(tmp_path, **{speed: "32.0 GT/s PCIe\n", width: "16\n", folder + "numa_node": node + "\n"})
    assert read_link(tmp_path, "0000:3b:00.0") == ("32.0 GT/s PCIe x16", expected)
    assert read_link(tmp_path, "0000:af:00.0") == (None, None)
