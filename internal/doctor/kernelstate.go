package doctor

// kernelChecks look at mounts, loop devices, memory of the kernel, limits, programs.
func kernelChecks() []check { return nil }
