"""Types that pass between stages, and the interfaces of exchangeable parts."""
