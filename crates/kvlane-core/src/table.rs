//! A table of values by endpoint.

use crate::endpoint::EndpointId;

/// Values by endpoint, indexed by slot. A new endpoint in a slot starts without a value. At most one value per slot of
/// the pool.
#[derive(Clone, Debug)]
pub(crate) struct ByEndpoint<T> {
    slots: Vec<Option<(EndpointId, T)>>,
}

// === impl ByEndpoint ===

impl<T> Default for ByEndpoint<T> {
    fn default() -> Self {
        Self { slots: Vec::new() }
    }
}

impl<T> ByEndpoint<T> {
    /// The value of an endpoint, if it has one.
    pub(crate) fn get(&self, id: EndpointId) -> Option<&T> {
        match self.slots.get(id.slot()) {
            Some(Some((holder, value))) if *holder == id => Some(value),
            _ => None,
        }
    }

    /// The endpoints with a value, in the order of their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (EndpointId, &T)> {
        self.slots.iter().flatten().map(|(id, value)| (*id, value))
    }

    /// The value of an endpoint, initialized with `first`.
    pub(crate) fn get_or_insert(&mut self, id: EndpointId, first: impl FnOnce() -> T) -> &mut T {
        if id.slot() >= self.slots.len() {
            self.slots.resize_with(id.slot() + 1, || None);
        }
        let slot = &mut self.slots[id.slot()];
        if slot.as_ref().is_some_and(|(holder, _)| *holder != id) {
            *slot = None;
        }
        &mut slot.get_or_insert_with(|| (id, first())).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_over_a_slot_begins_with_nothing() {
        let (first, second) = (EndpointId::new(3, 0), EndpointId::new(3, 1));
        let mut table = ByEndpoint::default();
        *table.get_or_insert(first, || 1) += 1;
        assert_eq!((table.get(first), table.get(second)), (Some(&2), None));
        assert_eq!(*table.get_or_insert(second, || 7), 7);
        assert_eq!((table.get(first), table.get(EndpointId::new(9, 0))), (None, None));
    }
}
