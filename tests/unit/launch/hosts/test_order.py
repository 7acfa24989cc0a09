"""What travels to a host, and what of it its list of processes shows."""

from __future__ import annotations

from opensmd.launch.hosts.order import Order, command_line, forwarded


def test_what_users_set_for_libraries_goes_along_and_what_describes_this_process_stays() -> None:
    goes = {"PYTHONPATH": "src", "OPENSMD_NATIVE": "0", "SMDRUN_BIND": "0", "OMP_NUM_THREADS": "1"}
    goes |= {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "SMP_X": "1"}
    stays = {"HOME": "/root", "SMDRUN_HOSTS": "a,b", "SMDRUN_JOB": "7", "SMDRUN_JOB_SECRET": "of an agent"}
    stays |= {
        "OPENSMD_FILLED": "{}",
        "OPENSMD_JOB_SECRET_FILE": "/here",
        "RANK": "0",
        "SMDRUN_NODE_RANK": "1",
    }
    assert forwarded({**goes, **stays}) == goes


def test_an_order_comes_as_it_was_given() -> None:
    order = Order("/home/me", {"OPENSMD_JOB_SECRET": "a\nb"}, ["-n", "2", "train.py"])
    line = order.to_line()
    assert line.count(b"\n") == 1
    assert Order.from_line(line) == order


def test_a_hosts_list_of_processes_shows_no_secret_and_no_name_is_taken_for_a_command() -> None:
    line = command_line(
        "/venv/bin/python", "/home/my work; rm", {"PYTHONPATH": "a b", "OPENSMD_JOB_SECRET": "x"}
    )
    assert line == (
        "cd '/home/my work; rm' && PYTHONPATH='a b' exec /venv/bin/python -m opensmd.launch.hosts.member"
    )
