"""What a layer asks of the device, counted without one: operations that it launches, times that the host waits."""
