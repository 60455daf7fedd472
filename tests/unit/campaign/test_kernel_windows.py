from trioflow.campaign.sweeps import kernels_by_window


def event(cat, name, ts, dur, tid=1, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    made = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}
    return {**made, "args": arguments}


def test_kernels_belong_to_the_window_that_launched_them_on_any_thread():
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "a", 0, 10),
        event("user_annotation", "a", 20, 10),
        event("user_annotation", "b", 40, 10),
        event("user_annotation", "other", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, 1, 11),
        event("cuda_runtime", "cudaLaunchKernel", 4, 1, 2, 12),
        event("cuda_runtime", "cudaLaunchKernel", 22, 1, 1, 13),
        event("cuda_driver", "cuLaunchKernel", 24, 1, 2, 14),
        event("cuda_runtime", "cudaLaunchKernel", 15, 1, 1, 15),
        event("cuda_runtime", "cudaDeviceSynchronize", 45, 1, 1, 16),
        # The device runs late and out of order: only the launch decides.
        event("kernel", "first", 60, 2, 7, 11),
        event("kernel", "second", 50, 3.5, 7, 12),
        event("kernel", "first", 70, 4, 7, 13),
        event("gpu_memset", "fill", 74, 1.5, 7, 14),
        event("kernel", "between windows", 80, 9, 7, 15),
    ]
    assert kernels_by_window(events, {"a", "b"}) == {"a": (5500, ["first", "fill"])}
