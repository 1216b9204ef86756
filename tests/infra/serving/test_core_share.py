import threading

import torch

from infra.serving.core_share import CoreShare, cores


def test_engines_share_the_cores_evenly_and_get_them_back() -> None:
    first, second = CoreShare(None), CoreShare(None)
    first.claim()
    alone = first.threads
    second.claim()
    assert first.threads == max(1, alone // 2) or cores() == 1
    second.release()
    assert first.threads == alone
    first.release()


def test_a_fixed_number_is_kept_and_set_for_the_calling_thread_only() -> None:
    seen: list[int] = []

    def engine() -> None:
        CoreShare(3).apply()
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [3]
