"""Devices that engines share with the trainer, with --colocate.

In: the trainer's orders to release and to resume. Out: engines without memory on a device, or with it.
"""
