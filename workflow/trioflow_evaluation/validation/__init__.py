"""Cost models judged on public measurements that they never saw."""
