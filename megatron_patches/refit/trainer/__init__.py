"""The trainer's part: publishes versions, and subscribes the engines that take them."""
