"""Many ranks as threads of one process: layouts and gradients at sizes that processes cannot reach."""
