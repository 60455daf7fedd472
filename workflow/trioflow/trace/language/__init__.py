"""Language models by their configuration: sizes read from files, traces made without a device."""
