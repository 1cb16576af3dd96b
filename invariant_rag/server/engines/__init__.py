"""Engines: what is behind the server. One file each, all with the methods of `base.Engine`."""
