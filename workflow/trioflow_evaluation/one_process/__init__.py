"""Plans whose ranks are devices of one process: DataParallel, and tensor parallelism with gathered outputs."""
